# moonshotai/Kimi-K2-Instruct. Source this, and pass "${MODEL_ARGS[@]}" and "${CKPT_ARGS[@]}" to train.py.
# By tools/model_args.py from config.json, which decides: train.py refuses flags that say something else.
MODEL_ARGS=(
   # size
   --num-layers 61
   --hidden-size 7168
   --ffn-hidden-size 18432
   --vocab-size 163840
   # attention
   --num-attention-heads 64
   --num-query-groups 64
   --qk-layernorm
   --multi-latent-attention
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   # positions
   --position-embedding-type rope
   --rotary-base 50000
   --rotary-percent 1.0
   --rotary-scaling-factor 32.0
   --rope-type yarn
   --mscale 1.0
   --mscale-all-dim 1.0
   --original-max-position-embeddings 4096
   # norms, activation, embeddings
   --normalization RMSNorm
   --norm-epsilon 1e-06
   --swiglu
   --disable-bias-linear
   --untie-embeddings-and-output-weights
   # experts
   --num-experts 384
   --moe-router-enable-expert-bias
   --moe-shared-expert-intermediate-size 2048
   --moe-router-num-groups 1
   --moe-router-group-topk 1
   --moe-router-topk-scaling-factor 2.827
   --moe-ffn-hidden-size 2048
   '--moe-layer-freq=[0]*1+[1]*60'
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-pre-softmax
   --moe-router-dtype fp32
)

if [ -z "${CKPT_ARGS+x}" ]; then
   CKPT_ARGS=(--hf-checkpoint "${HF_CHECKPOINT:-moonshotai/Kimi-K2-Instruct}")
fi
