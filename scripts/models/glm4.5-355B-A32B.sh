# zai-org/GLM-4.5. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 92
   --hidden-size 5120
   --ffn-hidden-size 12288
   --vocab-size 151552
   # attention
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
   --qk-layernorm
   # positions
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 0.5
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # experts
   --num-experts 160
   --moe-router-enable-expert-bias
   --moe-shared-expert-intermediate-size 1536
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.5
   --moe-ffn-hidden-size 1536
   '--moe-layer-freq=[0]*3+[1]*89'
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4.5}")
fi
