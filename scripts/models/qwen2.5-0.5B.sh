# Qwen/Qwen2.5-0.5B-Instruct. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 24
   --hidden-size 896
   --ffn-hidden-size 4864
   --vocab-size 151936
   # attention
   --num-attention-heads 14
   --group-query-attention
   --num-query-groups 2
   --kv-channels 64
   --add-qkv-bias
   # positions
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 1.0
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-06
   --swiglu
   --disable-bias-linear
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-Qwen/Qwen2.5-0.5B-Instruct}")
fi
