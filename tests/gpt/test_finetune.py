"""gpt/finetune.py, and those that build on it: a model of transformers, sharded and exported."""

import json
import pickle
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from helpers import (
    AOT_EAGER,
    LIMIT_MEMORY,
    PLAIN_SGD,
    SIGNAL,
    Lazy,
    first,
    patch,
    read_script,
    snippet,
)
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tools.launch.snapshots import (
    CHAT_TEMPLATE,
    CONFIG,
    load_gpt,
    make_model,
    max_abs_diff,
    write_chats,
    write_text,
)

# These import transformers, which takes seconds.
finetune, finetune_chat, frozen_layers = map(
    Lazy, ("gpt.finetune", "gpt.finetune_chat", "gpt.frozen_layers")
)
BATCH_SIZE, STEPS, CONTEXT = 12, 15, 8


def start(shell, ranks, name, setup, options="", file="gpt/finetune.py", **variables):
    write_text(shell.folder / "text", STEPS * BATCH_SIZE + BATCH_SIZE, CONTEXT)
    script = patch(shell.folder, file, setup)
    options = f"--text text --context {CONTEXT} --val_tokens {BATCH_SIZE * CONTEXT} {options}"
    options += f" --batch_size {BATCH_SIZE // ranks}"
    options += f" --snapshot_path {name} --export_path {name}_exported"
    return shell.ranks(f"{script} 1 1 {options}", ranks, **variables)


# What the sharded model computes from some tokens, before it is exported.
LOGITS = """
@before(script, "export")
def save_logits(model, tokenizer, args):
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    if script.dist.get_rank() == 0:
        torch.save(logits, f"{args.export_path}.pt")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changes"),
    first(
        1,
        [
            ("Qwen3", {"tie_word_embeddings": True}),
            ("Llama", {"tie_word_embeddings": False}),
            ("Gemma3Text", {"sliding_window": 4, "sliding_window_pattern": 2}),
        ],
    ),
)
def test_finetuned(shell, kind, changes):
    """One rank, and three stopped in mid-epoch: equal; what was exported is what was trained."""
    make_model(shell.folder / "model", kind, torch.float32, **changes)
    options = "--learning_rate 0.3"
    start(shell, 1, "one", PLAIN_SGD + LOGITS, options).succeeds()
    stop = {"SIGNAL": "15", "SIGNAL_AT": f"0 {3 * BATCH_SIZE}"}
    job = start(shell, 3, "several", PLAIN_SGD + LOGITS + SIGNAL, options, **stop)
    job.fails("stopped by a signal")
    assert f"epoch 0 + {10 * BATCH_SIZE} samples" in job.output
    options += " --recompute --micro_batch_size 3"
    output = start(shell, 3, "several", PLAIN_SGD + LOGITS, options).succeeds()
    assert output.endswith("exported to several_exported\n")
    make_model(shell.folder / "shallow", kind, num_hidden_layers=1, **changes)
    job = start(shell, 1, "several", "", "--model shallow")
    job.fails("saved by a model of model.config.num_hidden_layers=2, ", "num_hidden_layers=1, ")

    def weights(name):
        return finetune.AutoModelForCausalLM.from_pretrained(
            shell.folder / name, dtype=torch.float32
        )

    start_weights, one, several = map(weights, ("model", "one_exported", "several_exported"))
    assert max_abs_diff(one.parameters(), several.parameters()) < 5e-5
    assert max_abs_diff(one.parameters(), start_weights.parameters()) > 1e-2
    with torch.no_grad():
        logits = several(torch.arange(16)[None]).logits
    assert max_abs_diff([logits], [torch.load(shell.folder / "several_exported.pt")]) < 1e-5


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TEMPLATE = "{{ tools[0].function.name }}" + CHAT_TEMPLATE
HELLO = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "a\u2028b\x85c"}  # which str.splitlines() would cut


def read_chats(folder, template, *messages, context=60):
    """Returns the dataset of a file with a byte order mark, and twice a chat and a blank line."""
    make_model(folder / "model", "Llama")
    tokenizer = finetune.AutoTokenizer.from_pretrained(folder / "model", chat_template=template)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    chat = json.dumps({"messages": messages, "tools": TOOLS}, ensure_ascii=False)
    chat = chat.replace("\ud83d", r"\ud83d")  # half of a pair, which UTF-8 does not have
    (folder / "chats").write_text(f"{chat}\n\n{chat}\n \n", encoding="utf-8-sig")
    return tokenizer, finetune_chat.ChatDataset(folder / "chats", context, tokenizer)


@pytest.mark.parametrize(
    ("context", "trained"), [(60, "a\u2028b\x85c;"), (31, "a\u2028b")], ids=["whole", "cut"]
)
def test_chats(tmp_path, context, trained):
    """Of what the template makes of a chat, the answer is trained, as far as there is room."""
    tokenizer, chats = read_chats(tmp_path, TEMPLATE, HELLO, ANSWER, context=context)
    assert len(chats) == 2
    for inputs, targets in chats:
        assert len(inputs) == len(targets) == context
        assert tokenizer.decode(inputs).startswith("weather<user>Hi;<assistant>a\u2028")
        answer = targets != finetune_chat.IGNORED
        assert tokenizer.decode(targets[answer]) == trained
        assert torch.equal(targets[:-1][answer[:-1]], inputs[1:][answer[:-1]])


THINKING = TEMPLATE.replace("<assistant>{% endif", "<assistant><think>{% endif")
ENDS_IN_SPACE = TEMPLATE.replace("<{{ m.role }}>", "<{{ m.role }}> ").replace(
    "<assistant>{% endif", "<assistant> {% endif"
)
CALLS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}",
)
NO_SYSTEM = TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
NO_THOUGHTS = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
NO_ANSWER = "must end with a text of the assistant whose weight is not 0"
SPECIAL = "no text may have special tokens"
NO_PROMPT = r"the template's prompt '.*' does not begin '.*a"
LEFT_OUT = "the template leaves out or changes "


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments):
    return say("", tool_calls=[{"function": {"name": "forecast", "arguments": arguments}}])


REFUSED_CHATS = {
    "answer first": (TEMPLATE, [ANSWER, HELLO], NO_ANSWER),
    "tool call": (TEMPLATE, [HELLO, say(None, tool_calls=[{}])], NO_ANSWER),
    "no content": (TEMPLATE, [HELLO, {"role": "assistant"}], NO_ANSWER),
    "weight 0": (TEMPLATE, [HELLO, ANSWER | {"weight": 0}], NO_ANSWER),
    "own end": (TEMPLATE, [HELLO | {"content": "an <end> of mine"}, ANSWER], SPECIAL),
    "end in a call": (CALLS, [HELLO, call({"city": "<end>"}), ANSWER], SPECIAL),
    "parts": (TEMPLATE, [HELLO, say([{"type": "text", "text": "a"}])], "a 'list' object"),
    "list": (TEMPLATE, [HELLO, say(["a", "b"])], "a 'list' object"),
    "half a character": (TEMPLATE, [HELLO, say("\ud83d")], "TypeError"),
    "nested": (TEMPLATE, [[HELLO, ANSWER]], "AttributeError"),
    "empty": (TEMPLATE, [], "not enough values"),
    "template thinks": (THINKING, [HELLO, ANSWER], NO_PROMPT),
    "prompt ends in space": (ENDS_IN_SPACE, [HELLO, ANSWER], NO_PROMPT),
    "no tools": (CHAT_TEMPLATE, [HELLO, ANSWER], f"{LEFT_OUT}'weather'"),
    "no call": (TEMPLATE, [HELLO, call({}), ANSWER], f"{LEFT_OUT}'forecast'"),
    "encoded twice": (CALLS, [HELLO, call('{"city": ""}'), ANSWER], LEFT_OUT),
    "no system": (NO_SYSTEM, [HELLO | {"role": "system"}, ANSWER], f"{LEFT_OUT}'Hi'"),
    "no thoughts": (NO_THOUGHTS, [HELLO, say("<think>a</think>b")], f"{LEFT_OUT}'<think>a"),
}


@pytest.mark.parametrize(
    ("template", "messages", "message"), REFUSED_CHATS.values(), ids=REFUSED_CHATS
)
def test_refused_chats(tmp_path, template, messages, message):
    with pytest.raises(SystemExit, match=rf"chats, line 1: not a chat of texts: .*{message}"):
        read_chats(tmp_path, template, *messages)


def test_chat_with_a_call(tmp_path):
    """Arguments are an object; what the tool returns may be encoded."""
    returned = {"role": "tool", "content": '{"degrees": 20}'}
    messages = [HELLO, call({"city": "Oslo"}), returned, ANSWER]
    tokenizer, chats = read_chats(tmp_path, CALLS, *messages, context=200)
    text = tokenizer.decode(chats[0][0])
    assert '<assistant>{"name": "forecast", "arguments": {"city": "Oslo"}};<tool>"{' in text


@pytest.mark.long
def test_end_of_an_answer(tmp_path, monkeypatch, capfd):
    """The exported model stops where the template does, and where it did; one must be special."""
    from transformers import GenerationConfig

    make_model(tmp_path / "model", "Llama", torch.float32)
    GenerationConfig(eos_token_id=0).save_pretrained(tmp_path / "model")
    chat = {"messages": [HELLO | {"content": "Oslo?"}, say("Norway.")]}
    (tmp_path / "chats").write_text(f"{json.dumps(chat)}\n" * 320)
    options = "--text chats --context 32 --val_tokens 32 --batch_size 8 --learning_rate 2e-2"
    run_here(tmp_path, monkeypatch, options, finetune_chat)
    model = finetune.AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    tokenizer = finetune.AutoTokenizer.from_pretrained(tmp_path / "finetuned")
    end_id = tokenizer.convert_tokens_to_ids(";")
    assert model.generation_config.eos_token_id == [0, end_id]
    prompt = tokenizer("<user>Oslo?;<assistant>", return_tensors="pt")
    (tokens,) = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(tokens) == "<user>Oslo?;<assistant>Norway.;"
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE.replace(";", "\n"))
    shutil.rmtree(tmp_path / "finetuned")
    error = "the chat template ends an answer with '\\n': add a special token to it"
    assert refused(tmp_path, monkeypatch, capfd, options, finetune_chat) == error


# transformers names float32 where it computes in no less.
FLOAT64 = f"""{PLAIN_SGD}{AOT_EAGER}
torch.set_default_dtype(torch.float64)
torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
"""


@pytest.mark.long
def test_finetuned_chats(shell):
    """Answers differ in length, but three compiled ranks end as one; a part is frozen."""
    make_model(shell.folder / "model", "Llama", torch.float64)
    write_chats(shell.folder / "chats", (STEPS + 1) * BATCH_SIZE)
    options = "--learning_rate 0.3 --text chats --context 40 --val_tokens 480 --frozen_layers 1"
    val_losses = []
    compiled = "--recompute --compile --micro_batch_size 3"
    for ranks, name, more in [(1, "one", ""), (3, "several", compiled)]:
        job = start(shell, ranks, name, FLOAT64, f"{options} {more}", "gpt/finetune_chat.py")
        assert "180 chats to train on, 12 to validate on\n62 chats are cut to" in job.succeeds()
        assert "--context, 0 of them before the answer" in job.output
        val_losses += re.findall(r"val loss (\S+)", job.output)
    start_weights, one, several = (
        load_file(shell.folder / name / "model.safetensors")
        for name in ("model", "one_exported", "several_exported")
    )
    diff = max_abs_diff(one.values(), several.values())
    print("three ranks differ from one by", diff)
    assert diff < 1e-12
    for name, weight in start_weights.items():
        frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert torch.equal(weight, one[name]) == frozen
    losses = [load_gpt(shell.folder / name)["loss"] for name in ("one", "several")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    model = finetune.AutoModelForCausalLM.from_pretrained(shell.folder / "one_exported")
    tokenizer = finetune.AutoTokenizer.from_pretrained(shell.folder / "model")
    chats = [*finetune_chat.ChatDataset(shell.folder / "chats", 40, tokenizer)]
    inputs, targets = map(torch.stack, zip(*chats[-BATCH_SIZE:], strict=True))
    loss = cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())  # of each token
    assert [*map(float, val_losses)] == pytest.approx([loss.item()] * 2, rel=1e-3)
    with open(shell.folder / "chats", "a") as file:
        file.write('{"conversations": [{"from": "human", "value": "Hi"}]}\n')
    job = start(shell, 1, "other", "", options, "gpt/finetune_chat.py")
    job.fails("--text chats, line 193: not a chat of texts: KeyError('messages')")
    write_chats(shell.folder / "chats", 100)
    options += " --context 20 --frozen_layers 2"
    job = start(shell, 1, "other", "", options, "gpt/finetune_chat.py")
    job.fails("--frozen_layers must be 0 or more, and less than 2")
    assert "100 chats are cut to --context, 100 of them before the answer" in job.output
    template = shell.folder / "model" / "chat_template.jinja"
    template.write_text(f"{{{{ strftime_now('%d') }}}}{CHAT_TEMPLATE}")
    job = start(shell, 1, "other", "", options, "gpt/finetune_chat.py")
    job.fails("the chat template writes the day's date: put one in place of strftime_now")


@pytest.mark.long
def test_frozen_layers(shell):
    """No backward pass reaches them; a snapshot without their optimizer state trains no more."""
    make_model(shell.folder / "model", "Llama")
    options = "--frozen_layers 1 --recompute"
    job = start(shell, 1, "one", read_script("count_passes.py"), options, "gpt/frozen_layers.py")
    assert "passes with a gradient: [0.0, 2.0]" in job.succeeds()
    job = start(shell, 1, "one", "", f"{options} --frozen_layers 0", "gpt/frozen_layers.py")
    job.fails("model.embed_tokens.weight was frozen: keep --frozen_layers or train an export")
    job = start(shell, 1, "other", "", f"{options} --frozen_layers 2", "gpt/frozen_layers.py")
    job.fails("--frozen_layers must be 0 or more, and less than 2")
    start(shell, 1, "other", "", f"{options} --compile", "gpt/frozen_layers.py").succeeds()


def test_frozen_weights_stay_out_of_the_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    model[0].requires_grad_(False)
    groups = frozen_layers.configure_optimizer(model, 1e-3).param_groups
    assert [p for group in groups for p in group["params"]] == list(model[1].parameters())


LIMIT = f"""{LIMIT_MEMORY}
from transformers import LlamaForCausalLM  # which takes memory, too, when it is imported first
@before(script.AutoModelForCausalLM, "from_config")
def limit(*args, **options):
    limit_memory({{growth}})
"""
LOAD_WHOLE = """
def from_config(*args, **options):
    return script.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
script.AutoModelForCausalLM.from_config = from_config
"""


@pytest.mark.nightly
def test_starts_without_memory_for_the_whole_model(shell):
    """A limit on the memory of each of 4 ranks: half of what the weights need in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    growth = 4 * make_model(shell.folder / "model", "Llama", **sizes) // 2
    limit = LIMIT.format(growth=growth)
    job = start(shell, 1, "plain", LOAD_WHOLE + limit)
    assert job.wait() != 0 and "started" not in job.output
    job = start(shell, 4, "s", limit)
    assert job.wait() == 0, job.output
    assert job.output.count("started") == 4


def refused(tmp_path, monkeypatch, capfd, options="", script=finetune):
    """Returns what the script says when it refuses what it is to train."""
    with pytest.raises(SystemExit) as exit:
        run_here(tmp_path, monkeypatch, options, script)
    if dist.is_initialized():
        dist.destroy_process_group()
    assert not (tmp_path / "finetuned").is_dir()
    return capfd.readouterr().err if exit.value.code == 2 else exit.value.code


UNUSABLE = "cannot use model: broken, or not the layout of Llama"
OTHER_WEIGHTS = "cannot load the weights of model: another model's?"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"model_type": "llama"', '"model_type": "gpt2"', UNUSABLE),
        ('"vocab_size": 300', '"vocab_size": ', UNUSABLE),  # no JSON
        ('position_embeddings": 2048', 'position_embeddings": 7', "--context must be 7 or less "),
        ('"num_hidden_layers": 2', '"num_hidden_layers": 1', OTHER_WEIGHTS),
        ('"hidden_size": 32', '"hidden_size": 64', OTHER_WEIGHTS),
    ],
)
def test_refused_configs(tmp_path, monkeypatch, capfd, old, new, message):
    make_model(tmp_path / "model", "Llama")
    config = tmp_path / "model" / "config.json"
    assert config.read_text().count(old) == 1
    config.write_text(config.read_text().replace(old, new))
    lines = refused(tmp_path, monkeypatch, capfd).splitlines()
    assert lines[0].startswith(message) and len(lines) <= 2


def edit_weight(folder, name, weight):
    weights = load_file(folder / "model.safetensors")
    weights[name] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_refused_files(tmp_path, monkeypatch, capfd):
    make_model(tmp_path / "model", "Llama")
    (tmp_path / "finetuned").touch()
    error = "--export_path finetuned is a file: name a folder\n"
    assert refused(tmp_path, monkeypatch, capfd).endswith(error)
    (tmp_path / "finetuned").unlink()
    error = "--export_path must not be --model\n"
    assert refused(tmp_path, monkeypatch, capfd, "--export_path model").endswith(error)
    (tmp_path / "latin1").write_bytes(b"gr\xfcn")
    assert "--text is not UTF-8: " in refused(tmp_path, monkeypatch, capfd, "--text latin1")
    edit_weight(tmp_path / "model", "model.norm.weight", torch.full([32], torch.nan))
    error = "the gradient of step 1 is nan or inf: "
    assert refused(tmp_path, monkeypatch, capfd).startswith(error)
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    assert refused(tmp_path, monkeypatch, capfd).startswith(UNUSABLE)
    (tmp_path / "model" / "model.safetensors").unlink()
    error = "no config.json or no *.safetensors in --model model\n"
    assert refused(tmp_path, monkeypatch, capfd).endswith(error)


def test_text(tmp_path):
    """All of it becomes tokens, but for a byte order mark."""
    make_model(tmp_path / "model", "Llama")
    tokenizer = finetune.AutoTokenizer.from_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("\xf6\r\n", encoding="utf-8-sig", newline="")
    inputs, targets = finetune.TextDataset(tmp_path / "text", 3, tokenizer)[0]
    assert [*inputs, targets[-1]] == tokenizer("\xf6\r\n").input_ids


def test_exported(tmp_path, monkeypatch):
    """In the model's own type, in files of limited size, and with the tokens that end a text."""
    from transformers import GenerationConfig, PreTrainedModel

    make_model(tmp_path / "model", "Qwen3", tie_word_embeddings=True)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path / "model")
    save_pretrained = PreTrainedModel.save_pretrained

    def save_small_files(model, path, state_dict, max_shard_size):
        assert max_shard_size == "5GB"
        save_pretrained(model, path, state_dict=state_dict, max_shard_size="20KB")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_small_files)
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"  # which older models have
    edit_weight(tmp_path / "model", old, torch.ones(4))
    run_here(tmp_path, monkeypatch)
    assert len(list((tmp_path / "finetuned").glob("model-*.safetensors"))) > 2
    exported = finetune.AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    assert exported.generation_config.eos_token_id == [7, 9]
    trained = load_gpt(tmp_path / "s")["model"]
    assert trained.keys() == exported.state_dict().keys()
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, trained[name].bfloat16())


def run_here(tmp_path, monkeypatch, options="", script=finetune):
    """Trains within this process, since importing transformers takes seconds."""
    write_text(tmp_path / "text", 4 * BATCH_SIZE, CONTEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.signal, "signal", lambda signum, handler: None)  # pytest's stay
    sizes = f"--val_tokens {BATCH_SIZE * CONTEXT} --context {CONTEXT}"
    options = f"1 1 {sizes} --text text --snapshot_path s {options}"
    monkeypatch.setattr("sys.argv", ["finetune.py", *options.split()])
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")  # any that is free
    script.main(script.parse_args())


@pytest.mark.parametrize("tied", [True, False])
def test_flops(tmp_path, monkeypatch, tied):
    num_parameters = make_model(tmp_path / "model", "Llama", tie_word_embeddings=tied)
    counts = []
    monkeypatch.setattr(finetune.Trainer, "train", lambda self: counts.append(self.flops_per_token))
    run_here(tmp_path, monkeypatch)
    looked_up = 0 if tied else CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert counts == [6 * (num_parameters - looked_up)]


def test_flops_of_frozen_layers(tmp_path, monkeypatch):
    """They have no backward pass."""
    num_parameters = make_model(tmp_path / "model", "Llama")
    counts = []
    trainer = frozen_layers.Trainer
    monkeypatch.setattr(trainer, "train", lambda self: counts.append(self.flops_per_token))
    run_here(tmp_path, monkeypatch, "--frozen_layers 1", frozen_layers)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    frozen = sum(weight.numel() for name, weight in weights.items() if ".layers.0." in name)
    looked_up = weights["model.embed_tokens.weight"].numel()
    assert counts == [6 * (num_parameters - looked_up - frozen) + 2 * frozen]


def test_tied_head_in_the_files(tmp_path, monkeypatch, capfd):
    """Taken if it is the embedding."""
    make_model(tmp_path / "model", "Qwen3", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    edit_weight(tmp_path / "model", "lm_head.weight", 2 * embedding)
    error = "lm_head.weight is not the embedding: untie them"
    assert error in refused(tmp_path, monkeypatch, capfd)
    edit_weight(tmp_path / "model", "lm_head.weight", embedding)
    run_here(tmp_path, monkeypatch)
    output = capfd.readouterr().out
    assert "288 tokens to train on, 96 to validate on, 1 in neither" in output


def test_larger_tokenizer(tmp_path, monkeypatch, capfd):
    """Refused; the lines on the page give the model more tokens."""
    make_model(tmp_path / "model", "Llama", vocab_size=200)
    error = "the tokenizer has 257 tokens, the model 200"
    assert refused(tmp_path, monkeypatch, capfd) == error
    exec(snippet("gpt/finetune.md", "resize_token_embeddings", "python"))
    run_here(tmp_path, monkeypatch, "--model larger")


def test_files_of_two_models(tmp_path, monkeypatch, capfd):
    """A name in two files, and a file that the index does not list."""
    make_model(tmp_path / "model", "Llama")
    weights, stale = (tmp_path / "model" / f"{name}.safetensors" for name in ("model", "stale"))
    shutil.copy(weights, stale)
    error = "two files have ['lm_head.weight', 'model.embed_tokens.weight', 'model.layers.0."
    assert error in refused(tmp_path, monkeypatch, capfd)
    index = json.dumps({"weight_map": dict.fromkeys(load_file(weights), "model.safetensors")})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    weights.unlink()
    error = "model.safetensors.index.json does not list {'stale.safetensors'}: move them away"
    assert error in refused(tmp_path, monkeypatch, capfd)
    stale.rename(weights)
    run_here(tmp_path, monkeypatch)


def test_snapshot_of_another_base_model(tmp_path, monkeypatch, capfd):
    """Another config, tokenizer, template, or weights; older snapshots do not name theirs."""
    make_model(tmp_path / "model", "Llama")
    run_here(tmp_path, monkeypatch, "--export_path e")
    changes = {"config.json": (b"10000.0", b"20000.0"), "tokenizer.json": (b"false", b"true")}
    changes |= {"chat_template.jinja": (b"<", b"["), "model.safetensors": ()}
    for name, new in changes.items():
        path = tmp_path / "model" / name
        content = path.read_bytes()
        path.write_bytes(content.replace(*new) if new else content[:-1] + b"@")
        assert "began as config, weights and tokenizer " in refused(tmp_path, monkeypatch, capfd)
        path.write_bytes(content)
    path = tmp_path / "s" / "epoch_0001_sample_000000000000" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["model_key"]
    path.write_bytes(pickle.dumps(metadata))
    run_here(tmp_path, monkeypatch)
