# zai-org/GLM-4-32B-0414. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 61
   --hidden-size 6144
   --ffn-hidden-size 23040
   --vocab-size 151552
   # attention
   --num-attention-heads 48
   --group-query-attention
   --num-query-groups 2
   --kv-channels 128
   # positions
   --position-embedding-type rope
   --rotary-interleaved
   --rotary-base 10000
   --rotary-percent 0.5
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4-32B-0414}")
fi
