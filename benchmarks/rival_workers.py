"""What `benchmarks.rivals` runs in each way's process, of which two have an environment of their own.

A script gets its way, the model's folder or file, dtype and threads, reads a call a line and answers with its seconds,
the new tokens of each row, and the most memory that the process has had, in MiB. Its `prepare` does what a user does
once and returns the call.
"""

SERVE = """
import json, os, resource, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
way, folder, dtype, threads = *sys.argv[1:4], int(sys.argv[4])

def serve(prepare):
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        call = prepare(**json.loads(line))
        started = time.perf_counter()
        rows = call()
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(json.dumps([seconds, rows, peak]), file=answers, flush=True)
"""
TORCH_WORKER = """
import warnings, torch, transformers, spec_trl
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(threads)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
model.generation_config.eos_token_id = None
config = {"self": spec_trl.SpeculativeConfig(draft_length=3, sd_toggle="always")}.get(way)

def prepare(prompts, longest, new, seed, greedy):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    if way != "generate":
        options |= {"assistant_strategy": way, "return_dict_in_generate": True}
        options |= {"speculative_config": config} if config else {}
    torch.manual_seed(seed)

    def call():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **options)
        if way == "generate":
            return out[:, width:].tolist()
        if out.statistics.drafter_failure is not None:
            raise RuntimeError(out.statistics.drafter_failure)
        return out.sequences[:, width:].tolist()

    return call

serve(prepare)
"""
LLAMA_WORKER = """
import ctypes, llama_cpp as l
silent = l.llama_log_callback(lambda level, text, data: None)
l.llama_log_set(silent, ctypes.c_void_p(0))
l.llama_backend_init()
model = l.llama_model_load_from_file(folder.encode(), l.llama_model_default_params())
SIZE = 2048  # tokens of a batch
batch = l.llama_batch_init(SIZE, 0, 1)
context, shape, samplers = None, None, []

def context_of(rows, length):
    global context, shape
    if shape != (rows, length):
        if context:
            l.llama_free(context)
        options = l.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = rows * -(-length // 256) * 256, rows, SIZE
        options.n_threads = options.n_threads_batch = threads
        options.no_perf = True
        context, shape = l.llama_init_from_model(model, options), (rows, length)
        assert context, "no context"
    return context

def sampler_of(seed, greedy):
    sampler = l.llama_sampler_chain_init(l.llama_sampler_chain_default_params())
    l.llama_sampler_chain_add(sampler, l.llama_sampler_init_greedy() if greedy else l.llama_sampler_init_dist(seed))
    return sampler

def decode(tokens, rows):
    # Of each token: itself, its place, its row, and whether the next one is sampled.
    batch.n_tokens = len(tokens)
    for i, (token, place, row, last) in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, place, last
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
    assert l.llama_decode(context, batch) == 0, "llama_decode failed"
    for i, (_, _, row, last) in enumerate(tokens):
        if last:
            rows[row].append(l.llama_sampler_sample(samplers[row], context, i))

def prepare(prompts, longest, new, seed, greedy):
    global samplers
    memory = l.llama_get_memory(context_of(len(prompts), longest + new))
    for sampler in samplers:
        l.llama_sampler_free(sampler)
    samplers = [sampler_of(seed + row, greedy) for row in range(len(prompts))]

    def call():
        rows = [[] for _ in prompts]
        l.llama_memory_clear(memory, False)
        ids = [(t, i, row, i == len(own) - 1) for row, own in enumerate(prompts) for i, t in enumerate(own)]
        for start in range(0, len(ids), SIZE):
            decode(ids[start : start + SIZE], rows)
        for step in range(new - 1):
            decode([(rows[row][-1], len(own) + step, row, True) for row, own in enumerate(prompts)], rows)
        return rows

    return call

serve(prepare)
"""
OPENVINO_WORKER = """
import numpy, openvino, openvino_genai as genai
precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
scheduler = genai.SchedulerConfig()
scheduler.max_num_batched_tokens = 8192  # prompts of 64 rows: a tenth faster or more than with the default of 256
pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)

def prepare(prompts, longest, new, seed, greedy):
    configs = []
    for row in range(len(prompts)):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, not greedy
        config.temperature, config.rng_seed = 1.0, seed + row
        configs.append(config)
    inputs = [openvino.Tensor(numpy.array([row])) for row in prompts]
    return lambda: [result.m_generation_ids[0] for result in pipeline.generate(inputs, configs)]

serve(prepare)
"""
