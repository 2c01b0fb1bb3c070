"""Options: read from four places, checked before anything slow, resolved into what runs."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.options.engine_config import EngineConfig, resolve
from engine.options.options import DECLARATIONS, Arity, OptionError, Options
from engine.options.sources import add_flags, read_options
from engine.options.values import Bytes, Count, Duration, Fraction, Switch, ValueKind, show_bytes


def read(*words: str, environment: dict[str, str] | None = None) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read_options(vars(parser.parse_args(words)), environment or {})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def test_without_any_source_every_option_has_its_default() -> None:
    assert read() == Options()
    assert (read().max_num_seqs, read().watermark, read().port) == (None, 0.01, 8000)


def test_flags_win_over_the_environment_and_that_over_the_file(file) -> None:
    file.write_text("max-num-seqs: 1\nmax_num_batched_tokens: 4K\nport: 1\nwatermark: 2%\n")
    environment = {"TOKENYARD_MAX_NUM_SEQS": "2", "TOKENYARD_PORT": "2", "TOKENYARD_CONFIG": str(file)}
    options = read("--max-num-seqs", "3", environment=environment)
    assert options == dataclasses.replace(
        Options(), max_num_seqs=3, port=2, max_num_batched_tokens=4096, watermark=0.02
    )


_SAMPLES: dict[str, tuple[str, Any]] = {
    "model": ("org/name", "org/name"),
    "checksums": ("SHA256SUMS", "SHA256SUMS"),
    "served_model_name": ("chat", ("chat",)),
    "task": ("embed", "embed"),
    "dtype": ("BFLOAT16", "bfloat16"),
    "device": ("cuda:1", "cuda:1"),
    "max_model_len": ("32K", 32768),
    "cpu_kernels": ("OFF", "off"),
    "gpu_kernels": ("off", "off"),
    "enforce_eager": ("yes", True),
    "attention_backend": ("fa3", "fa3"),
    "quantization": ("int8", "int8"),
    "quantize_head": ("int8", "int8"),
    "activations": ("int8", "int8"),
    "lora_modules": ("sql=/adapters/sql", ("sql=/adapters/sql",)),
    "lora_directory": ("/adapters", "/adapters"),
    "max_loras": ("2", 2),
    "max_lora_rank": ("32", 32),
    "max_cpu_loras": ("8", 8),
    "num_threads": ("2", 2),
    "block_size": ("64", 64),
    "num_gpu_blocks_override": ("1_000", 1000),
    "gpu_memory_utilization": ("85%", 0.85),
    "kv_cache_memory": ("1.5GiB", 3 * 2**29),
    "enable_prefix_caching": ("no", False),
    "max_num_seqs": ("8", 8),
    "max_num_batched_tokens": ("8k", 8000),
    "max_prefill_tokens": ("512", 512),
    "scheduling_policy": ("priority", "priority"),
    "watermark": ("0", 0.0),
    "swap_space": ("4GiB", 2**32),
    "tensor_parallel_size": ("2", 2),
    "data_parallel_size": ("2", 2),
    "pipeline_parallel_size": ("2", 2),
    "nnodes": ("2", 2),
    "node_rank": ("1", 1),
    "master_addr": ("10.0.0.1", "10.0.0.1"),
    "cluster_port": ("29700", 29700),
    "distributed_executor": ("ray", "ray"),
    "cluster_key": ("a secret of all machines together", "a secret of all machines together"),
    "speculative_config": ('{"method": "ngram", "num_speculative_tokens": 3}',) * 2,
    "speculative_model": ("./draft", "./draft"),
    "kv_cache_dtype": ("fp8", "fp8"),
    "kv_events_port": ("5557", 5557),
    "kv_events_host": ("::1", "::1"),
    "kv_events_topic": ("kv@10.0.0.11:8000@m", "kv@10.0.0.11:8000@m"),
    "target_itl": ("50ms", 0.05),
    "batching": ("separate", "separate"),
    "prefill_delay_factor": ("0.5", 0.5),
    "trace_steps": ("/tmp/steps", "/tmp/steps"),
    "priority_aging": ("30s", 30.0),
    "fairness": ("tenant", "tenant"),
    "tenant_weight": ("acme=2", ("acme=2",)),
    "preemption_mode": ("recompute", "recompute"),
    "models": ("/etc/models.yaml", "/etc/models.yaml"),
    "queue_timeout": ("5s", 5.0),
    "target_first_token": ("2s", 2.0),
    "first_token_timeout": ("1m", 60.0),
    "request_timeout": ("0", 0.0),
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "api_key": ("k", ("k",)),
    "allow_unauthenticated": ("on", True),
    "api_keys_file": ("/tmp/keys.yaml", "/tmp/keys.yaml"),
    "metrics_auth": ("on", True),
    "admin_port": ("0", 0),
    "tls_cert": ("/tmp/cert.pem", "/tmp/cert.pem"),
    "tls_key": ("/tmp/key.pem", "/tmp/key.pem"),
    "tls_client_ca": ("/tmp/ca.pem", "/tmp/ca.pem"),
    "cors_origin": ("https://app.example", ("https://app.example",)),
    "state_folder": ("/tmp/state", "/tmp/state"),
    "state_max_size": ("1MiB", 2**20),
    "page": ("off", "off"),
    "root_path": ("/llm", "/llm"),
    "uds": ("/run/yard.sock", "/run/yard.sock"),
    "chat_template": ("/models/own.jinja", "/models/own.jinja"),
    "default_chat_template_kwargs": ('{"enable_thinking": false}', '{"enable_thinking": false}'),
    "override_generation_config": ('{"top_k": 5}', '{"top_k": 5}'),
    "hf_overrides": ('{"a": 1}', '{"a": 1}'),
    "allowed_host": ("gpu-box", ("gpu-box",)),
    "max_memory_use": ("90%", 0.9),
    "max_queued_requests": ("7", 7),
    "enable_admin": ("on", True),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("think", "think"),
    "max_queued_tokens": ("1M", 2**20),
    "max_body_size": ("1MB", 1_000_000),
    "strict_fields": ("on", True),
    "stream_keep_alive": ("0", 0.0),
    "responses_store_memory": ("1MiB", 2**20),
    "grammar_compile_timeout": ("500ms", 0.5),
    "shutdown_timeout": ("2m", 120.0),
    "drain_delay": ("10s", 10.0),
    "health_port": ("8001", 8001),
    "heartbeat_timeout": ("5s", 5.0),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "limit_mm_per_prompt": ('{"image": 3}', '{"image": 3}'),
    "max_image_pixels": ("1M", 2**20),
    "allowed_media_domains": ("pictures.example", ("pictures.example",)),
    "mm_processor_kwargs": ('{"max_pixels": 1}', '{"max_pixels": 1}'),
    "otlp_traces_endpoint": ("http://h:4318/v1/traces", "http://h:4318/v1/traces"),
}


def test_options_stay_few() -> None:
    assert len(DECLARATIONS) <= 102  # four are for pictures, by the names that vLLM gave them


def test_every_option_can_be_set_from_each_source_and_describes_itself(file, subtests) -> None:
    for name in DECLARATIONS:
        with subtests.test(name):
            text, value = _SAMPLES[name]
            key = name.replace("_", "-")
            if isinstance(DECLARATIONS[name].kind, Switch):
                words = [f"--{key}" if value else f"--no-{key}"]
            else:
                words = [f"--{key}", text]
            expected = dataclasses.replace(Options(), **{name: value})
            assert expected != Options()
            assert read(*words) == expected
            assert read(environment={f"TOKENYARD_{name.upper()}": text}) == expected
            file.write_text(f"{key}: {text!r}\n")
            assert read("--config", str(file)) == expected
            assert DECLARATIONS[name].help


def test_repeatable_options_take_repeated_flags_commas_in_the_environment_and_lists_in_the_file(file) -> None:
    file.write_text("served-model-name: [a, b]\napi-key: c,d\n")
    assert read("--config", str(file)).served_model_name == ("a", "b")
    assert read("--config", str(file)).api_key == ("c,d",)
    assert read("--api-key", "a,b", "--api-key", "c").api_key == ("a,b", "c")
    assert read(environment={"TOKENYARD_API_KEY": "a, b,"}).api_key == ("a", "b")


def test_yaml_may_hold_plain_numbers_and_switches_and_null_leaves_an_option_open(file) -> None:
    file.write_text("port: 9\nenable-prefix-caching: false\nwatermark: 0.2\nmax-model-len: null\n")
    expected = dataclasses.replace(Options(), port=9, enable_prefix_caching=False, watermark=0.2)
    assert read("--config", str(file)) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"TOKENYARD_PORT": "tcp://10.0.0.1:8000"},
        {"TOKENYARD_PORT_8000_TCP": "tcp://10.0.0.1:8000", "TOKENYARD_PORT_8000_TCP_ADDR": "10.0.0.1"},
        {"TOKENYARD_SERVICE_HOST": "10.0.0.1", "TOKENYARD_SERVICE_PORT_HTTP": "8000"},
        {"TOKENYARD_METRICS_SERVICE_PORT": "9", "TOKENYARD_METRICS_PORT_9_TCP_PROTO": "tcp"},
        {"PORT": "x", "tokenyard_port": "x"},
    ],
)
def test_variables_that_a_cluster_sets_for_its_services_are_not_options(environment) -> None:
    assert read(environment=environment) == Options()


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("TOKENYARD_MAX_NUM_SEQ", "did you mean TOKENYARD_MAX_NUM_SEQS"), ("TOKENYARD_QQQQ", "--help")],
)
def test_an_unknown_variable_is_an_error_that_names_the_closest_option(variable, advice) -> None:
    with pytest.raises(OptionError, match=advice):
        read(environment={variable: "1"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-sqs: 1", "did you mean max-num-seqs"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
        ("max-num-seqs: [1]", "single value"),
        ("- port", "option: value"),
        ("port: [", "not valid YAML"),
        ("port: 2001-01-01", "single value"),
        (None, "no such file"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(file, content, words) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=words) as caught:
        read("--config", str(file))
    assert "\n" not in str(caught.value)


def test_an_empty_file_changes_nothing(file) -> None:
    file.write_text("# nothing yet\n")
    assert read("--config", str(file)) == Options()


def test_a_secret_is_shown_neither_in_an_error_nor_in_the_configuration(checkpoint, file) -> None:
    with pytest.raises(OptionError) as caught:
        read("--port", "x", environment={"TOKENYARD_API_KEY": "sk-1234", "TOKENYARD_LOG_LEVEL": "x"})
    assert "sk-" not in str(caught.value)
    file.write_text("api-key: {sk-1234: x}")
    with pytest.raises(OptionError) as caught:
        read("--config", str(file))
    assert "sk-" not in str(caught.value)
    _, server = resolve(dataclasses.replace(Options(), model=str(checkpoint), api_key=("sk-1234",)))
    assert "sk-" not in repr(server)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Count(low=0, high=10**7), "2K", 2048),
        (Count(low=0, high=10**7), "2k", 2000),
        (Count(low=0, high=10**7), "1.5Ki", 1536),
        (Count(low=0, high=10**7), " 12_000 ", 12000),
        (Bytes(low=0, high=2**60), "4GiB", 2**32),
        (Bytes(low=0, high=2**60), "4G", 2**32),
        (Bytes(low=0, high=2**60), "4GB", 4 * 10**9),
        (Bytes(low=0, high=2**60), "4gb", 4 * 10**9),
        (Bytes(low=0, high=2**60), "512 MiB", 2**29),
        (Duration(low=0, high=100), "500ms", 0.5),
        (Duration(low=0, high=100), "1.5m", 90.0),
        (Fraction(low=0, high=1), "90%", 0.9),
    ],
)
def test_numbers_may_be_written_as_people_write_them(kind: ValueKind, text, value) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Count(low=1, high=9), "0"),
        (Count(low=1, high=9), "10"),
        (Count(low=1, high=9), "-1"),
        (Count(low=1, high=9), "1.5"),
        (Count(low=1, high=9), ""),
        (Count(low=1, high=9), "0x5"),
        (Count(low=0, high=10**7), "4KB"),
        (Bytes(low=1, high=2**40), "four"),
        (Fraction(low=0.1, high=1), "nan"),
        (Fraction(low=0.1, high=1), "101%"),
        (Duration(low=0, high=10), "11"),
        (Duration(low=0, high=10), "-1"),
        (Switch(), "maybe"),
    ],
)
def test_a_value_out_of_bounds_or_form_is_refused_with_what_it_must_be(kind: ValueKind, text) -> None:
    with pytest.raises(ValueError, match=r"^be "):
        kind.parse(text)


@pytest.mark.parametrize("name", [name for name, d in DECLARATIONS.items() if hasattr(d.kind, "low")])
def test_both_ends_of_a_range_are_accepted_and_what_lies_beyond_is_not(name) -> None:
    kind: Any = DECLARATIONS[name].kind
    assert kind.parse(str(kind.low)) == kind.low
    assert kind.parse(str(kind.high)) == kind.high
    with pytest.raises(ValueError, match="be from"):
        kind.parse(str(kind.high * 2 + 1))


def test_defaults_lie_within_their_own_bounds() -> None:
    for item in dataclasses.fields(Options):
        declaration = DECLARATIONS[item.name]
        if item.default is not None and declaration.arity is Arity.ONE:
            assert declaration.kind.parse(declaration.kind.show(item.default)) == item.default


def test_amounts_of_memory_are_shown_in_binary_units() -> None:
    assert [show_bytes(n) for n in (5, 2**10, 3 * 2**29, 2**42)] == ["5 bytes", "1 KiB", "1.5 GiB", "4 TiB"]


def test_resolving_fills_in_what_was_left_open_and_survives_the_way_to_the_engine(checkpoint) -> None:
    engine, server = resolve(read(str(checkpoint), "--no-enable-prefix-caching"), environment={})
    assert engine.served_names == ("small-llama",)
    assert engine.model_path == engine.worker.model_path == str(checkpoint)
    assert (engine.scheduler.prefix_caching, engine.scheduler.policy) == ("off", "fcfs")
    assert engine.worker.gpu_memory_utilization == 0.9
    assert (server.host, server.port, server.api_keys) == ("127.0.0.1", 8000, ())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=EngineConfig) == engine


def test_a_served_name_with_a_star_is_a_pattern_and_the_model_keeps_a_name(checkpoint) -> None:
    words = [str(checkpoint), "--served-model-name", "*"]
    engine, _ = resolve(read(*words), environment={})
    assert (engine.served_names, engine.name_patterns) == (("small-llama",), ("*",))
    engine, _ = resolve(read(*words, "--served-model-name", "a"), environment={})
    assert (engine.served_names, engine.name_patterns) == (("a",), ("*",))
    with pytest.raises(OptionError, match=r"--served-model-name \*x\*: has more than one \*"):
        resolve(read(str(checkpoint), "--served-model-name", "*x*"), environment={})


def test_what_was_asked_reaches_what_runs(checkpoint) -> None:
    options = read(
        *["--model", str(checkpoint), "--served-model-name", "a", "--served-model-name", "b"],
        *["--max-model-len", "1K", "--block-size", "8", "--num-gpu-blocks-override", "64"],
        *["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--num-threads", "1", "--device", "cpu"],
        *["--dtype", "float32", "--scheduling-policy", "priority", "--max-queued-requests", "5"],
        *["--heartbeat-timeout", "9", "--shutdown-timeout", "8", "--max-body-size", "2MiB"],
    )
    engine, server = resolve(options, environment={})
    worker = engine.worker
    assert engine.served_names == ("a", "b")
    assert (worker.max_model_len, worker.block_size, worker.num_blocks) == (1024, 8, 64)
    assert (worker.max_num_seqs, worker.max_num_batched_tokens, worker.num_threads) == (4, 32, 1)
    assert (worker.dtype, worker.device, engine.scheduler.policy) == ("float32", "cpu", "priority")
    assert (engine.max_queued_requests, engine.heartbeat_timeout_s) == (5, 9.0)
    assert (server.shutdown_timeout_s, server.max_body_bytes) == (8.0, 2**21)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-events-host", "::1"], "no events are published"),
        (["--kv-events-port", "5557", "--no-enable-prefix-caching"], "nothing to report"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "63"], "one token of each step"),
        (["--max-prefill-tokens", "4K"], "a step has 2048 tokens at most"),
        (["--num-gpu-blocks-override", "9", "--kv-cache-memory", "1GiB"], "both set the size"),
        (["--device", "cpu", "--gpu-memory-utilization", "0.9"], "no effect"),
        (["--device", "cuda:1", "--num-threads", "2"], "no effect"),
        (["--device", "cpu", "--gpu-kernels", "off"], "no effect"),
        (["--device", "cpu", "--enforce-eager"], "no effect"),
        (["--device", "cpu", "--attention-backend", "fa3"], "no effect"),
        (["--device", "cpu", "--attention-backend", "flashinfer"], "no effect"),
        (["--attention-backend", "xformers"], "triton, fa3, flashinfer"),
        (["--host", "0.0.0.0"], "API key"),
        (["--host", "my-host.example"], "API key"),
        (["--model", "another"], "two different models"),
        (["--preemption-mode", "swap"], "no swap space"),
        (
            ["--swap-space", "1GiB", "--no-enable-prefix-caching", "--preemption-mode", "recompute"],
            "nothing is swapped",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(checkpoint, words, message) -> None:
    with pytest.raises(OptionError, match=message):
        resolve(read(str(checkpoint), *words), environment={})


@pytest.mark.parametrize(
    "words",
    [
        ["--host", "0.0.0.0", "--api-key", "k"],
        ["--host", "::", "--allow-unauthenticated"],
        ["--host", "127.0.0.9"],
        ["--host", "::1"],
        ["--host", "localhost"],
    ],
)
def test_an_open_address_needs_a_key_or_an_explicit_word(checkpoint, words) -> None:
    _, server = resolve(read(str(checkpoint), *words), environment={})
    assert server.host == words[1]


def test_the_folder_of_an_adapter_is_told_from_a_model(checkpoint) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(OptionError, match=f"an adapter, no model; .* --lora-modules NAME={checkpoint}"):
        resolve(read(str(checkpoint)), environment={})


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_checkpoint_is_refused_by_the_name_of_what_is_missing(checkpoint, missing) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(OptionError, match=missing.replace("model.", "")):
        resolve(read(str(checkpoint)), environment={})


@pytest.mark.parametrize("model", ["org/absent", "nowhere", "/no/such/place", "../..//nowhere", "a/b/c"])
def test_a_model_that_is_nowhere_is_refused(model, tmp_path) -> None:
    with pytest.raises(OptionError, match="no such folder"):
        resolve(read(model), environment={"HF_HOME": str(tmp_path)})


def test_a_file_is_no_model(checkpoint) -> None:
    with pytest.raises(OptionError, match="folder"):
        resolve(read(str(checkpoint / "config.json")), environment={})


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_hub_name_is_found_in_the_local_cache(checkpoint, tmp_path, variable) -> None:
    cache = tmp_path / "hub"
    repository = cache / "models--org--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    checkpoint.rename(repository / "snapshots" / "abc")
    environment = {variable: str(tmp_path if variable == "HF_HOME" else cache)}
    engine, _ = resolve(read("org/small"), environment=environment)
    assert engine.served_names == ("org/small",)
    assert engine.model_path == str(repository / "snapshots" / "abc")
