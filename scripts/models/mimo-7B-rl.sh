# XiaomiMiMo/MiMo-7B-RL. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 36
   --hidden-size 4096
   --ffn-hidden-size 11008
   --vocab-size 151680
   # attention
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   # positions
   --position-embedding-type rope
   --rotary-base 640000
   --rotary-percent 1.0
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-XiaomiMiMo/MiMo-7B-RL}")
fi
