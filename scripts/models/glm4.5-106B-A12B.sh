# zai-org/GLM-4.5-Air. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 46
   --hidden-size 4096
   --ffn-hidden-size 10944
   --vocab-size 151552
   # attention
   --num-attention-heads 96
   --group-query-attention
   --num-query-groups 8
   --kv-channels 128
   --add-qkv-bias
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
   --num-experts 128
   --moe-router-enable-expert-bias
   --moe-shared-expert-intermediate-size 1408
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 1.0
   --moe-ffn-hidden-size 1408
   '--moe-layer-freq=[0]*1+[1]*45'
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4.5-Air}")
fi
