"""The options of the model: the checkpoint, the device, the numbers that it is computed in."""

from dataclasses import dataclass
from functools import partial

from engine.options.declaration import Arity, Group, declared
from engine.options.values import Choice, Count, Pattern, Switch, Text

TOOL_CALL_PARSERS = Choice(
    words=(
        *("auto", "hermes", "llama3_json", "llama4_json", "mistral", "granite", "phi4", "json"),
        *("deepseek", "kimi_k2", "harmony", "qwen3_coder", "glm45", "minimax_m2", "pythonic", "lfm2"),
        *("olmo3", "gemma4", "functiongemma", "deepseek_v32", "cohere", "hunyuan", "nemotron", "longcat"),
        *("internlm", "minicpm5", "minimax_m3", "generic", "none"),
    ),
    # Names that vLLM has.
    synonyms=(
        *(("deepseek_v3", "deepseek"), ("deepseek_v31", "deepseek"), ("deepseek_v4", "deepseek_v32")),
        *(("cohere_command3", "cohere"), ("cohere_command4", "cohere"), ("hunyuan_a13b", "hunyuan")),
        *(("jamba", "hunyuan"), ("hy_v3", "glm45"), ("glm47", "glm45"), ("poolside_v1", "glm45")),
        *(("qwen3_xml", "qwen3_coder"), ("seed_oss", "qwen3_coder"), ("step3p5", "qwen3_coder")),
        *(("mimo", "qwen3_coder"), ("granite4", "hermes"), ("ernie45", "hermes"), ("openai", "harmony")),
        *(("phi4_mini_json", "phi4"), ("llama4_pythonic", "pythonic"), ("xlam", "json")),
    ),
)
TOOL_CALL_HELP = (
    "How the model writes tool calls, for requests that leave the choice to it. auto takes the "
    "checkpoint's response_template if it has one, else looks at the chat template; generic shows the "
    "tools in the prompt and lets a grammar keep to their schemas, for models that were not trained "
    "to call, at the cost of a mask for each token; none refuses."
)
REASONING_PARSERS = Choice(
    words=(
        *("auto", "think", "mistral", "seed_oss", "gemma4", "harmony", "cohere", "cohere_text"),
        *("minimax_m3", "none"),
    ),
    synonyms=(
        *(
            (name, "think")
            for name in ("qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47")
        ),
        *((name, "think") for name in ("kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "step3p5", "mimo")),
        *((name, "think") for name in ("ernie45", "hy_v3", "holo2", "poolside_v1")),
        *(("openai_gptoss", "harmony"), ("cohere_command3", "cohere"), ("cohere_command4", "cohere_text")),
    ),
)
REASONING_HELP = (
    "How the model marks its reasoning, which a reply shows apart from the answer: think is <think> and "
    "</think>, mistral [THINK], harmony the channels of gpt-oss. auto takes the checkpoint's "
    "response_template if it has one, else looks for the marks in the chat template and the tokenizer. "
    "A name for either parser sets the template aside."
)

_model = partial(declared, Group.MODEL)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the model: a part of Options."""

    model: str | None = _model(
        Text(metavar="MODEL"),
        "Checkpoint folder, a GGUF file, or the hub name (org/name) of a checkpoint that is in the local hub "
        "cache already. `tokenyard pull` fetches one; nothing is downloaded from here.",
        open_default="a tiny built-in model, for trying the server out",
    )
    models: str | None = _model(
        Text(metavar="FILE"),
        "YAML file of several models that this one server loads, each with its own options, or a folder of "
        "models, each loaded when it is asked for. Several MODELs on the command line share all options.",
        open_default="one model",
    )
    checksums: str | None = _model(
        Text(metavar="FILE"),
        "List of the SHA-256 of the model's files, as sha256sum writes it in their folder. Weights, "
        "configuration, tokenizer and templates are compared with it at every start.",
        open_default="nothing is compared",
    )
    served_model_name: tuple[str, ...] = _model(
        Text(metavar="NAME"),
        "Name that requests use. Repeat it for several; replies report the first. One with a * for any text "
        "takes all names of its form, for programs with fixed names: 'claude-*', '*'.",
        arity=Arity.MANY,
        open_default="the hub name, or the folder's name",
    )
    chat_template: str | None = _model(
        Text(metavar="FILE"),
        "Jinja file with the chat template, in the place of the checkpoint's own. It is run in the same "
        "sandbox.",
        open_default="the checkpoint's own",
    )
    default_chat_template_kwargs: str | None = _model(
        Text(metavar="JSON"),
        "Variables of the chat template for requests that do not set them, such as "
        '{"enable_thinking": false}. Each template has its own, so that no default fits; those that it does '
        "not read have no effect.",
        open_default="the template's own",
    )
    override_generation_config: str | None = _model(
        Text(metavar="JSON"),
        'Defaults of sampling that win over generation_config.json, such as {"temperature": 0.7, "top_p": '
        "0.9}; requests win over both.",
        open_default="those of generation_config.json",
    )
    hf_overrides: str | None = _model(
        Text(metavar="JSON"),
        "Values for config.json, merged into it key by key; null takes a key away. For a longer context, say "
        '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}; wrong values make wrong text.',
        open_default="config.json as it is",
    )
    task: str = _model(
        Choice(words=("auto", "generate", "embed", "score")),
        "Task of the model: text, embeddings, or scores of pairs of texts. auto follows the checkpoint; "
        "embed also makes vectors with a model that generates.",
        default="auto",
    )
    dtype: str = _model(
        Choice(
            words=("auto", "float32", "bfloat16", "float16"),
            synonyms=(("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32")),
        ),
        "Number format of weights and KV cache. auto takes the checkpoint's own; 16 bits halve the memory, "
        "and on CPUs without support for them cost speed.",
        default="auto",
    )
    device: str = _model(
        Pattern(pattern=r"auto|cpu|cuda(:\d{1,3})?", form="auto, cpu, cuda or cuda:1", metavar="DEVICE"),
        "Where the model runs. auto takes the first GPU if there is one.",
        default="auto",
    )
    max_model_len: int | None = _model(
        Count(low=1, high=2**24, metavar="TOKENS"),
        "Longest prompt and answer together, in tokens. Longer needs more KV cache for one request.",
        open_default="the model's own context window, as far as it fits the KV cache",
    )
    num_threads: int | None = _model(
        Count(low=1, high=1024),
        "Compute threads, on CPU only, of each rank. More than there are cores makes every step slower.",
        open_default="one for each physical core this process may use, divided among ranks",
    )
    tensor_parallel_size: int = _model(
        Count(low=1, high=64, metavar="RANKS"),
        "Processes that compute the model together, each with a part of every layer and of the KV cache. On "
        "GPUs each has one of its machine's CUDA_VISIBLE_DEVICES, in their order; with a number in "
        "--device all share that one, slowly, for trials. On CPUs it is for machines with several memory "
        "nodes: a rank uses --num-threads threads. Ranks wait for each other twice in a layer, so that one "
        "rank is simpler where it is as fast. With --nnodes and fewer stages than machines a stage's ranks "
        "are on several, and wait longer.",
        default=1,
    )
    data_parallel_size: int = _model(
        Count(low=1, high=64, metavar="ENGINES"),
        "Engines behind this one server, each with the whole model, a KV cache and the other limits of this "
        "page for itself; on GPUs each has one, on CPUs they share the cores. Requests wait in one line, and "
        "one goes to an engine when that can begin it soon. More engines serve more requests at once, and "
        "none of them faster; weights take memory once for each.",
        default=1,
    )
    pipeline_parallel_size: int = _model(
        Count(low=1, high=64, metavar="STAGES"),
        "Groups of layers, each computed by processes of its own (--tensor-parallel-size in each). On GPUs "
        "each process has one, unless --device has a number. Stages work on different sequences at the same "
        "time and exchange little; one alone is computed no faster.",
        default=1,
    )
    nnodes: int | None = _model(
        Count(low=1, high=64, metavar="NODES"),
        "Machines that compute the model together, each with as many stages of --pipeline-parallel-size, or "
        "with as many ranks of --tensor-parallel-size of one stage, which is much slower. The same command "
        "runs on all of them; the first listens for requests, and the memory that options ask for is that of "
        "each. More machines hold larger models; each stage that is elsewhere makes a token later by the "
        "time that its numbers travel.",
        open_default="LWS_GROUP_SIZE, or WORLD_SIZE with MASTER_ADDR, or 1",
    )
    node_rank: int | None = _model(
        Count(low=0, high=63, metavar="NUMBER"),
        "Number of this machine among --nnodes, from 0, which is the one that listens for requests.",
        open_default="LWS_WORKER_INDEX, or RANK",
    )
    master_addr: str | None = _model(
        Text(metavar="ADDRESS"),
        "Address of the first machine, at which the others reach it; it listens there and nowhere else.",
        open_default="LWS_LEADER_ADDRESS, or MASTER_ADDR",
    )
    cluster_port: int = _model(
        Count(low=1, high=65535, metavar="PORT"),
        "Port on the first machine for the others. MASTER_PORT is not read: torchrun uses it itself.",
        default=29600,
    )
    cluster_key: str | None = _model(
        Text(metavar="KEY"),
        "Secret that all machines share, of 32 characters or more; what they exchange is encrypted with keys "
        "made of it, but for what GPUs exchange with each other. A flag can be seen by other users of a "
        "machine: prefer TOKENYARD_CLUSTER_KEY.",
        is_secret=True,
        open_default="none, and then there are no --nnodes",
    )
    distributed_executor: str = _model(
        Choice(words=("processes", "ray")),
        "Starter of ranks on other machines. processes: this command, run on each of them. ray: the Ray "
        "cluster of which this machine is a node; it finds --nnodes nodes, by default as few as hold all "
        "ranks, with --num-threads processors for each rank, or a processor and a GPU. Needs "
        "`tokenyard[ray]` on all machines.",
        default="processes",
    )
    cpu_kernels: str = _model(
        Choice(
            words=(
                "auto",
                "off",
                "avx512-bf16",
                "avx512-expanded",
                "amx",
                "avx512-vnni",
                "avx-vnni",
                "avx2",
                "plain",
            )
        ),
        "Tokenyard's own CPU kernels, compiled once with the machine's C++ compiler: several times faster "
        "than torch alone. auto uses torch alone if there is no compiler, and of several ways to multiply "
        "bfloat16 the one that is fastest here, measured for some milliseconds at start. A name asks for the "
        "same on every machine: numbers differ a little between them.",
        default="auto",
    )
    gpu_kernels: str = _model(
        Choice(words=("auto", "off")),
        "Tokenyard's own GPU kernels, compiled by Triton at start: several times faster than torch alone. "
        "Turn them off to see whether a wrong answer comes from them.",
        default="auto",
    )
    attention_backend: str = _model(
        Choice(words=("triton", "fa3", "flashinfer")),
        "Kernels of attention on a GPU. triton: Tokenyard's own. fa3, flashinfer: FlashAttention 3 (its "
        "package, or vLLM's) or FlashInfer where it is installed and a trial at start finds it right and 5% "
        "faster, which starts some seconds later; FlashInfer takes 256 MiB, and minutes of the first "
        "start where it is to be compiled.",
        default="triton",
    )
    enforce_eager: bool = _model(
        Switch(),
        "Launch the kernels of a step one by one on a GPU, instead of capturing steps as CUDA graphs: starts "
        "sooner and leaves more memory to the KV cache, but small steps take several times as long.",
        default=False,
    )
    quantization: str = _model(
        Choice(
            words=("none", "int8", "int4", "fp8"),
            hint="; a checkpoint that is quantized already is read as it is, without this option",
        ),
        "int8 keeps the weights of the layers as 8-bit numbers, and rounds what they multiply to 8 bits "
        "token by token: about twice as fast on CPU and half the memory, at some loss of accuracy. int4 "
        "keeps them as 4-bit numbers with a scale for each 32: a third of the memory, at more loss. fp8 "
        "keeps them as 8-bit floats with a scale for each output: half the memory, for GPUs. Weights that "
        "the checkpoint holds quantized stay as they are. Needs the CPU or GPU kernels.",
        default="none",
    )
    quantize_head: str = _model(
        Choice(words=("none", "int8")),
        "int8 keeps the output layer as 8-bit numbers too, which reads half of its bytes for each step: a "
        "gain for small models, whose output layer is large. An embedding that is tied to it is kept "
        "too. Needs the CPU or GPU kernels.",
        default="none",
    )
    activations: str = _model(
        Choice(words=("none", "int8", "fp8")),
        "int8 rounds what 4-bit and 8-bit weights in groups multiply to 8 bits, token by token: faster with "
        "several sequences on CPU, at some loss of accuracy. Needs the CPU kernels. fp8 does the same on "
        "GPUs to what 8-bit floats with one scale for each output multiply.",
        default="none",
    )
