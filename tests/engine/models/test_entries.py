"""Several models on the command line and in the file of --models: what each is resolved to."""

import shutil
from pathlib import Path

import pytest

from engine.models.entries import ModelSpec, resolve_models
from engine.models.yard import KeepRule
from engine.options.engine_config import resolve
from engine.options.options import OptionError, Options
from engine.options.sources import read_options
from engine.types import Profile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / name / file).write_text("{}")
    return tmp_path


def read(folder: Path, *more: str, **given: str) -> tuple[ModelSpec, ...]:
    """Resolve, with the file `models.yaml` if there is one."""
    file = folder / "models.yaml"
    flags = {"models": str(file)} if file.exists() else {}
    return resolve_models(read_options({**flags, **given}, {}), more, environment={})[0]


def write(folder: Path, text: str) -> None:
    (folder / "models.yaml").write_text(text.replace("FOLDER", str(folder)))


def test_one_model_is_resolved_as_ever(folder: Path) -> None:
    options = Options(model=str(folder / "first"), served_model_name=("x", "y*"), tool_call_parser="json")
    engine, server = resolve(options, environment={})
    ((spec,), found) = resolve_models(options, environment={})
    assert (spec.engine, found) == (engine, server)
    assert (spec.tool_call_parser, spec.names.served, spec.names.patterns) == ("json", ("x",), ("y*",))


def test_models_of_the_command_line_share_all_options(folder: Path) -> None:
    specs = read(folder, str(folder / "second"), model=str(folder / "first"), max_num_seqs="7")
    assert [spec.names.served for spec in specs] == [("first",), ("second",)]
    assert {spec.engine.scheduler.max_num_seqs for spec in specs} == {7}


def test_the_file_gives_each_model_options_of_its_own_over_the_defaults_over_the_command_line(
    folder: Path,
) -> None:
    write(
        folder,
        """
        defaults: {max-num-seqs: 5, dtype: float32}
        models:
          - {model: FOLDER/first, served_model_name: [chat, "claude-*"], reasoning_parser: think}
          - {model: FOLDER/second, max_num_seqs: 3, kv_cache_memory: 2MiB}
          - served_model_name: demo
        """,
    )
    specs = read(folder, max_num_seqs="9", block_size="8", trace_steps=str(folder / "steps.jsonl"))
    assert [spec.engine.scheduler.max_num_seqs for spec in specs] == [5, 3, 5]
    assert {(spec.engine.worker.dtype, spec.engine.worker.block_size) for spec in specs} == {("float32", 8)}
    assert [spec.engine.worker.kv_cache_bytes for spec in specs] == [None, 2 << 20, None]
    assert [spec.reasoning_parser for spec in specs] == ["think", "auto", "auto"]
    assert specs[0].names.patterns == ("claude-*",)
    assert len({spec.engine.trace_file for spec in specs}) == 3


def test_a_profile_is_a_further_name_of_its_model_with_defaults_of_its_own(folder: Path) -> None:
    write(
        folder,
        """
        models:
          - {model: FOLDER/first, served_model_name: [chat, "claude-*"]}
          - {of: chat, served_model_name: quick, override_generation_config: {temperature: 0.2}}
          - {model: FOLDER/second, override_generation_config: {top_k: 3}}
          - {of: second, served_model_name: brief, default_chat_template_kwargs: '{"thinking": false}'}
        """,
    )
    first, second = read(folder)
    assert first.engine.profiles == (Profile(name="quick", sampling={"temperature": 0.2}),)
    assert second.engine.profiles == (Profile(name="brief", template_kwargs={"thinking": False}),)
    assert (first.names.variants, second.names.variants) == (("quick",), ("brief",))
    assert second.engine.worker.sampling_overrides == {"top_k": 3}


def test_the_file_of_the_page_about_models_on_demand_is_right_as_it_is(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "several-models.md").read_text()
    example = page.split("## On demand")[1].split("```yaml\n")[1].split("```")[0]
    for name in ("Qwen3-8B", "Qwen3-32B", "bge-m3"):
        shutil.copytree(folder / "first", folder / name)
    write(folder, example.replace("/models/", "FOLDER/"))
    assert [spec.keep for spec in read(folder)] == [
        KeepRule(is_pinned=True, keep_alive_s=600),
        KeepRule(at_start=False, keep_alive_s=600),
        KeepRule(at_start=False, keep_alive_s=24 * 3600),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: []", "no list of models"),
        ("- a", "no list of models"),
        ("{models: [{}], other: 1}", "'other' is not known"),
        ("models: [a]", "not `option: value`"),
        ("models: [{port: 1}]", "port in entry 1 of .*models.yaml: there is no such option"),
        ("models: [{scheduling_policy: fcfs}]", "there is no such option"),
        ("models: [{}, {max_num_seq: 1}]", "max-num-seqs"),
        ("models: [{}, {max_num_seqs: none}]", "entry 2 of .* whole number"),
        ("models: [{}, {}]", "the name tokenyard-demo: .* both have it"),
        ("models: [{}, {model: FOLDER/first, served_model_name: tokenyard-demo}]", "both have it"),
        ("models: [{model: FOLDER/none}]", "no such folder"),
        ("models: {", "not valid YAML"),
        ("models: [{of: x, served_model_name: y}]", "it has no model but profiles"),
        ("models: [{}, {of: x, served_model_name: y}]", "of: x in entry 2 .* name one of tokenyard-demo"),
        ("models: [{}, {of: tokenyard-demo}]", "entry 2 .* a profile has one name"),
        ("models: [{}, {of: tokenyard-demo, served_model_name: 'y*'}]", "one name, without a"),
        ("models: [{}, {of: tokenyard-demo, served_model_name: tokenyard-demo}]", "has it again"),
        ("models: [{}, {of: tokenyard-demo, served_model_name: y, dtype: float32}]", "no such option"),
        (
            "models: [{}, {of: tokenyard-demo, served_model_name: y, override_generation_config: {seed: 1}}]",
            "sets seed, which has no default here",
        ),
        ("models: [{override_generation_config: {2020-01-01: 1}}]", "it must be an object of JSON"),
        ("models: [{pin: true, keep-alive: 5m}]", "keep-alive in entry 1 .* a pinned model never leaves"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_its_place(folder: Path, text: str, words: str) -> None:
    write(folder, text)
    with pytest.raises(OptionError, match=words):
        read(folder)


def test_a_file_and_a_model_exclude_each_other_and_so_does_a_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(OptionError, match="no such file"):
        read(folder, models=str(folder / "models.yaml"))
    write(folder, "models: [{}]")
    with pytest.raises(OptionError, match="both say what is served"):
        read(folder, model=str(folder / "first"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("served_model_name", ["x"]),
        ("chat_template", "x"),
        ("lora_modules", ["a=b"]),
        ("kv_events_port", "5"),
        ("nnodes", "2"),
        ("distributed_executor", "ray"),
    ],
)
def test_an_option_that_only_one_model_can_have_is_refused_for_several(
    folder: Path, name: str, value
) -> None:
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: "):
        read(folder, str(folder / "second"), model=str(folder / "first"), **{name: value})


def test_a_command_for_one_model_takes_no_file_of_several() -> None:
    with pytest.raises(OptionError, match="takes one model"):
        resolve(Options(models="models.yaml"), environment={})


def test_a_folder_of_models_serves_each_of_them_on_demand(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("notes", "nothing", ".cache", "lost+found"):
        (folder / name).mkdir()
    (folder / "link").symlink_to(folder / "first")
    (folder / ".cache" / "config.json").write_text("{}")
    parts = [f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in ("cut.gguf", "first.gguf", "mmproj-cut.gguf", *parts):
        (folder / name).write_text("GGUF")
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)  # whoever runs the tests may read all
    specs, _ = resolve_models(read_options({"models": str(folder), "max_num_seqs": "7"}, {}), environment={})
    names = [spec.names.served[0] for spec in specs]
    assert names == ["big-00001-of-00002", "cut", "first", "first.gguf", "second"]
    assert {(spec.keep.at_start, spec.keep.keep_alive_s) for spec in specs} == {(False, 600)}
    assert [bool(spec.fault) for spec in specs] == [True, True, False, True, False]
    assert "lost+found is left out: [Errno 13]" in caplog.text
    with pytest.raises(OptionError, match="it has no model, neither a folder"):
        resolve_models(read_options({"models": str(folder / "nothing")}, {}), environment={})
    monkeypatch.setattr(Path, "iterdir", lambda path: refused(path / "lost+found" / "x"))
    with pytest.raises(OptionError, match=r"it cannot be read: .*denied"):
        resolve_models(read_options({"models": str(folder)}, {}), environment={})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("chat_template: FOLDER/none.jinja", "none.jinja"),
        ("lora_modules: [law=FOLDER/none]", "law"),
        ("checksums: FOLDER/none", "--checksums"),
    ],
)
def test_a_file_that_an_entry_on_demand_names_and_that_is_missing_is_its_fault(
    folder: Path, line: str, words: str
) -> None:
    write(folder, f"models: [{{model: FOLDER/first, load: demand, {line}}}, {{model: FOLDER/second}}]")
    first, second = read(folder)
    assert (words in first.fault, second.fault, first.names.served) == (True, "", ("first",))
    write(folder, f"models: [{{model: FOLDER/first, {line}}}, {{model: FOLDER/second}}]")
    with pytest.raises(OptionError):
        read(folder)


@pytest.mark.parametrize("load", ["start", "demand"])
@pytest.mark.parametrize("name", ["a\\0b", "x" * 5000])
def test_a_name_that_no_folder_can_have_is_refused(folder: Path, name: str, load: str) -> None:
    write(folder, f'models: [{{model: "{name}", load: {load}}}]')
    with pytest.raises(OptionError, match="check the path"):
        read(folder)
