# meta-llama/Llama-3.2-3B-Instruct. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 28
   --hidden-size 3072
   --ffn-hidden-size 8192
   --vocab-size 128256
   # attention
   --num-attention-heads 24
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   # positions
   --position-embedding-type rope
   --rotary-base 500000
   --rotary-percent 1.0
   --use-rope-scaling
   --rope-scaling-factor 32.0
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --swiglu
   --disable-bias-linear
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-meta-llama/Llama-3.2-3B-Instruct}")
fi
