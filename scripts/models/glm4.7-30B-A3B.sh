# zai-org/GLM-4.7-Flash. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 47
   --hidden-size 2048
   --ffn-hidden-size 10240
   --vocab-size 154880
   # attention
   --num-attention-heads 20
   --num-query-groups 20
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 768
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   # positions
   --position-embedding-type rope
   --rotary-base 1000000
   --rotary-percent 1.0
   --rotary-scaling-factor 1.0
   --rope-type rope
   --mscale 1.0
   --mscale-all-dim 1.0
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-05
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # experts
   --num-experts 64
   --moe-router-enable-expert-bias
   --moe-shared-expert-intermediate-size 1536
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 1.8
   --moe-ffn-hidden-size 1536
   '--moe-layer-freq=[0]*1+[1]*46'
   --moe-router-topk 4
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-zai-org/GLM-4.7-Flash}")
fi
