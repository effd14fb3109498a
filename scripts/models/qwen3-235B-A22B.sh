# Qwen/Qwen3-235B-A22B. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 94
   --hidden-size 4096
   --ffn-hidden-size 12288
   --vocab-size 151936
   # attention
   --num-attention-heads 64
   --group-query-attention
   --num-query-groups 4
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
   # experts
   --num-experts 128
   --moe-router-topk 8
   --moe-ffn-hidden-size 1536
   --moe-layer-freq 1
   --moe-router-score-function softmax
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen3-235B-A22B}")
fi
