# Qwen/Qwen3-32B. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 64
   --hidden-size 5120
   --ffn-hidden-size 25600
   --vocab-size 151936
   # attention
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --qk-layernorm
   # positions
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 1.0
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-06
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-32B}")
fi
