"""Wrong inputs of the command line, each with the messages that it must get."""

from __future__ import annotations

import json

from input_case import (
    BASE,
    CHAT,
    DATA,
    JOB_NAME_RULE,
    LENGTH,
    LORA,
    LR,
    NAME,
    OUT,
    Case,
    at,
    data,
    job,
    lora,
    model,
    named,
    override,
    rate,
    source,
    top,
)

from weft.errors import install_command

UNKNOWN = [
    Case("run", (at(2, "output_dri"), "unknown setting. Did you mean output_dir?"), (OUT, "output_dri: out")),
    Case(
        "default",
        (at(4, "defaults.max_lenght"), "unknown setting. Did you mean max_length?"),
        (LENGTH, "max_lenght: 9"),
    ),
    Case("job", (at(12, "jobs.1.learning_rat"), "Did you mean learning_rate?"), (LR, "learning_rat: 1")),
    Case("like nothing", (at(12, "jobs.1.zzz"), "unknown setting. `weft config` lists all settings."), (LR, "zzz: 1")),
    lora("rnak: 4", "rnak", "unknown setting. Did you mean rank?"),
]

ELSEWHERE = [
    top(
        "train_data: rows.jsonl", "is a setting of a job; write it in an item of jobs, or in defaults for all of them."
    ),
    top("r: 8", "is a setting of the adapter; write it in adapter of a job or of defaults."),
    job("r: 8", "r", "is a setting of the adapter; write it in adapter of a job or of defaults."),
    job("target_modules: [q_proj]", "target_modules", "is a setting of the adapter; "),
    job(
        "microbatch_tokens: 64", "microbatch_tokens", "is a setting of the whole run; write it at the top of the file."
    ),
    Case("lr in adapter", (at(6, "defaults.lora.lr"), "is a setting of a job; "), (LORA, "lora: {rank: 4, lr: 1}")),
    Case(
        "one job and no list",
        (at(2, "data"), "is a setting of a job; write it in an item of jobs"),
        text="model: tiny\ndata: rows.jsonl\n",
    ),
]

FILE = [
    Case("no file", ("gone.yaml: there is no such file. `weft init` writes a jobs file",), args=("gone.yaml",)),
    Case("a directory", (".: is a directory, not a jobs file.",), args=(".",)),
    Case("a name too long", (f"{'x' * 300}: cannot be read", "File name too long"), args=("x" * 300,)),
    Case("not text", ("bin: is not UTF-8 text.",), args=("bin",), files={"bin": b"\xff\xfe"}),
    Case(
        "the data",
        ("rows.jsonl: is a data file by its name, not a jobs file, which is YAML. `weft init`",),
        args=("rows.jsonl",),
    ),
    Case("empty", ("jobs.yaml: the file is empty.",), text=""),
    Case("only comments", ("jobs.yaml: the file is empty.",), text="# later\n"),
    Case("unclosed", ("jobs.yaml line 7: is not valid YAML: ", "expected ',' or '}'"), (LORA, "lora: {rank: 4")),
    Case("tab", ("jobs.yaml line 4: is not valid YAML: ", r"'\t'"), (LENGTH, f"\t{LENGTH}")),
    Case("bell", ("jobs.yaml: is not valid YAML: unacceptable character #x0007",), (OUT, "run_name: \a")),
    Case(
        "two documents",
        ("jobs.yaml line 3: is not valid YAML: expected a single document",),
        (OUT, f"{OUT}\n---\na: 1"),
    ),
    Case("no such day", ("jobs.yaml: has an impossible value: day is",), (OUT, "run_name: 2024-02-30")),
    Case("python object", ("jobs.yaml line 2: is not valid YAML: ",), (OUT, "run_name: !!python/name:os.system x")),
    Case("key twice", ("jobs.yaml line 13: jobs.1.lr is set twice, here and on line 12.",), (LR, f"{LR}\n    lr: 2")),
    Case(
        "two names in a job",
        (at(13, "jobs.1.learning_rate"), "lr and learning_rate are two names of one setting; keep one."),
        (LR, f"{LR}\n    learning_rate: 2"),
    ),
    Case(
        "two names in an adapter",
        (at(6, "defaults.lora.lora_r"), "rank and lora_r are two names of one setting; keep one."),
        (LORA, "lora: {rank: 4, lora_r: 4}"),
    ),
    Case(
        "two names at the top", (at(2, "model"), "base_model and model are two names"), (BASE, f"{BASE}\nmodel: tiny")
    ),
    Case("a list", ("jobs.yaml: expected settings such as base_model and jobs, got a list.",), text="- a\n"),
    Case(
        "jobs not a list",
        (at(2, "jobs"), "expected a list of jobs, got a mapping."),
        text="model: tiny\njobs: {a: 1}\n",
    ),
    Case("no jobs", (at(2, "jobs"), "there are no jobs; write at least one."), text="model: tiny\njobs: []\n"),
    Case("jobs left out", ("jobs.yaml: jobs: expected a list of jobs, got nothing.",), text="model: tiny\n"),
    Case("job not a mapping", (at(2, "jobs.0"), "name and train_data, got 'a'."), text="model: tiny\njobs: [a]\n"),
    Case("a default name", (at(4, "defaults.name"), "each job has its own."), (LENGTH, "name: x")),
    Case("no name", ("jobs.yaml line 10: jobs.1: name is missing.",), (f"{NAME}\n    {DATA}", DATA)),
    Case("no data", ("jobs.yaml line 10: jobs.1: train_data is missing.",), (DATA, LR)),
    Case("no model", ("jobs.yaml: base_model is missing.",), (f"{BASE}\n", "")),
]

RUN = [
    top("capacity: 0", "must be at least 2, got 0."),
    top("capacity: many", "expected auto or a whole number, got 'many'."),
    top("capacity: 1e30", "expected auto or a whole number, got '1e30'."),
    top("capacity: true", "expected auto or a whole number, got True."),
    top("dtype: fp8", "got 'fp8'; accepted are auto, float32, bfloat16."),
    top("device: tpu", "got 'tpu'; accepted are auto, cpu, cuda."),
    top("report_to: [tensorbord]", "got tensorbord; accepted are tensorboard, wandb, mlflow."),
    Case(
        "tenant_weights: {a: 0}",
        (at(3, "tenant_weights.a"), "must be above 0, got 0."),
        (OUT, f"{OUT}\ntenant_weights: {{a: 0}}"),
    ),
    Case(
        "tracker not installed",
        ("report_to: wandb cannot be imported", install_command("wandb")),
        (OUT, f"{OUT}\nreport_to: wandb"),
    ),
    Case(
        "tracker not installed, tried dry",
        ("report_to: wandb cannot be imported", install_command("wandb")),
        (OUT, f"{OUT}\nreport_to: wandb"),
        args=("jobs.yaml", "--dry-run"),
    ),
    Case("output_dir empty", (at(2, "output_dir"), "is empty; write a name or a path."), (OUT, 'output_dir: ""')),
    Case("output_dir with NUL", (at(2, "output_dir"), "holds a NUL character."), (OUT, 'output_dir: "a\\0b"')),
    Case("out is a file", ("rows.jsonl: is a file; name a directory.",), args=("jobs.yaml", "--out", "rows.jsonl")),
    Case("out under a file", ("rows.jsonl/a/b: ", "is a file"), args=("jobs.yaml", "--out", "rows.jsonl/a/b")),
    Case("out too long", (f"{'x' * 300}: the name is too long.",), args=("jobs.yaml", "--out", "x" * 300)),
    Case("out in no place", ("/proc/x: there is no such directory.",), args=("jobs.yaml", "--out", "/proc/x")),
    Case("nothing to resume", ("out: there is no run to resume. Leave out --resume",), args=("jobs.yaml", "--resume")),
]

ADAPTER = [
    lora("r: 0", "r", "must be at least 1, got 0."),
    lora("rank: -1", "r", "must be at least 1, got -1."),
    lora("rank: many", "r", "expected a whole number, got 'many'."),
    lora("rank: 1.5", "r", "expected a whole number, got 1.5."),
    lora("rank: 65", "r", "rank 65 is above the smaller side of model.layers.0.", "k_proj (64 x 192).", owner="jobs.0"),
    lora("rank: 1e9", "r", "rank 1000000000 is above the smaller side of", owner="jobs.0"),
    lora("rank_pattern: {q_proj: 0}", "rank_pattern.q_proj", "must be at least 1, got 0."),
    lora("rank_pattern: {q_proj: 999}", "rank_pattern", "rank 999 is above the smaller side of", owner="jobs.0"),
    lora("rank_pattern: {q_prj: 4}", "rank_pattern", "matches no adapted module: 'q_prj'", owner="jobs.0"),
    lora(
        "alpha_pattern: {o_proj: 4}, target_modules: [q_proj]",
        "alpha_pattern",
        "no adapted module: 'o_proj'",
        owner="jobs.0",
    ),
    lora("target_modules: [q_proj, lm_head]", "target_modules", "lm_head is the output head,", owner="jobs.0"),
    lora("alpha: 1e300", "lora_alpha", "'1e300' is too large; the most is 1e+18."),
    lora("alpha: -1", "lora_alpha", "must be at least 0, got -1.0."),
    lora("dropout: 1.0", "lora_dropout", "must be at least 0 and below 1, got 1.0."),
    lora("method: adalora", "method", "got 'adalora'; accepted are lora, "),
    lora("init: corda", "init_lora_weights", "got 'corda'; accepted are true, false, gaussian, orthogonal, "),
    lora("r: 3, init: orthogonal", "init_lora_weights", "orthogonal needs even ranks."),
    lora(
        "target_modules: [q_porj]",
        "target_modules",
        "the backbone has no linear module 'q_porj'; it has down_proj, ",
        "Did you mean q_proj?",
        owner="jobs.0",
    ),
    lora(
        "target_modules: q_proj",
        "target_modules",
        "no linear module of the backbone matches 'q_proj'; ",
        "such as model.layers.0.self_attn.q_proj, names go in a list.",
        owner="jobs.0",
    ),
    lora('target_modules: "*"', "target_modules", "'*' is not a regular expression (nothing to repeat at position 0)."),
    lora("target_modules: []", "target_modules", "the list is empty; name modules or use all-linear."),
    lora('exclude_modules: ".*"', "exclude_modules", "once exclude_modules is applied.", owner="jobs.0"),
    lora(
        "layers: [99]",
        "layers_to_transform",
        "layer 99 does not exist; the backbone has layers 0 to 5.",
        owner="jobs.0",
    ),
    Case("adapter a number", (at(6, "defaults.adapter"), "expected a mapping of settings, got 8."), (LORA, "lora: 8")),
]

JOB = [
    rate("-1", "must be above 0, got -1.0."),
    rate("0", "must be above 0, got 0.0."),
    rate(".nan", "expected a finite number, got nan."),
    rate(".inf", "expected a finite number, got inf."),
    rate("1e300", "'1e300' is too large; the most is 1e+18."),
    rate("fast", "expected a number, got 'fast'."),
    rate("[1]", "expected a number, got a list."),
    job("warmup_steps: -1", "warmup_steps", "must be at least 0, got -1.0."),
    job("save_steps: 1e30", "save_steps", "'1e30' is too large; the most is 1e+18."),
    job("epochs: 1e18", "num_train_epochs", "must be at most 1000000, got 1e+18."),
    job("epochs: 0", "num_train_epochs", "must be above 0, got 0.0."),
    job("seed: 1e10", "seed", "must be at least 0 and below 4294967296, got 10000000000."),
    job("shuffle: maybe", "shuffle", "expected true/false, got 'maybe'."),
    job("lr_scheduler: cosin", "lr_scheduler_type", "got 'cosin'; accepted are linear, cosine, constant, "),
    job("format: jsonl", "data_format", "got 'jsonl'; accepted are auto, chat, completion, "),
    job("long_samples: keep", "long_samples", "got 'keep'; accepted are truncate, drop, error."),
    job("batch_size: 8\n    micro_batch_size: 3", "global_batch_size", "is 8, but per_device_train_batch_size x "),
    job(
        "eval_data: 0",
        "eval_data",
        "got 0; accepted are a fraction between 0 and 1, a whole number of samples, or files.",
    ),
    job("eval_data: 10%", "eval_data", "got 10%; accepted are a fraction between 0 and 1, "),
    job(
        "eval_data: [{path: rows.jsonl, type: alpaca}]",
        "eval_data",
        "'type' is no setting of a data source, which has path, weight, rows, streaming; "
        "the format of rows goes in data_format.",
    ),
    job(
        "eval_data: [{path: rows.jsonl, weight: 2}]",
        "eval_data.0.weight",
        "evaluation reads every sample once, so a weight changes nothing; leave it out.",
    ),
    job("eval_data: 1.0", "eval_data", "got 1.0, which could be all samples or one; write 1 for one sample, "),
    job("eval_data: 1.5", "eval_data", "got 1.5; accepted are a fraction between 0 and 1, "),
    job("eval_data: []", "eval_data", "no files; name at least one, or leave it out."),
    job("early_stopping_patience: 2", "early_stopping_patience", "needs eval_data."),
    Case(
        "eval_data: 99",
        ("two: eval_data: 99 of 8 samples leaves no sample to train on.",),
        (LR, f"{LR}\n    eval_data: 99"),
    ),
    Case("eval_data: gone", ("gone.jsonl: there is no such file.",), (LR, f"{LR}\n    eval_data: gone.jsonl")),
    named("one", "'one' is also the name of jobs.0; names must differ."),
    named("ONE", "'ONE' is also the name of jobs.0; names must differ."),
    named("a/b", "'a/b' is not a job name; ", JOB_NAME_RULE),
    named("..", "'..' is not a job name; ", JOB_NAME_RULE),
    named("x" * 65, "is not a job name; ", JOB_NAME_RULE),
    named("report.html", "'report.html' is a name the run directory uses itself."),
    named("7", "expected text, got 7."),
    Case("length 1", (at(4, "defaults.max_length"), "must be at least 2, got 1."), (LENGTH, "max_length: 1")),
    Case(
        "length above capacity",
        (at(4, "jobs.0.max_length"), "max_length 4096 is above the run's capacity of 2048 tokens; lower max_length"),
        (LENGTH, "cutoff_len: 4096"),
        args=("jobs.yaml", "capacity=2048"),
    ),
    Case(
        "length above positions",
        (at(4, "jobs.0.max_length"), "max_length 2000 is above the backbone's positions (1024)."),
        (LENGTH, "max_length: 2000"),
    ),
    job('chat_template: "{{ messages"', "chat_template", "is not a valid Jinja template: ", "(line 1)."),
    job("chat_template: chatml", "chat_template", "'chatml' is not a Jinja template"),
    Case(
        "template refuses",
        ("rows.jsonl line 1: the chat template refuses this conversation: no.",),
        (LR, f"{LR}\n    chat_template: \"{{{{ raise_exception('no') }}}}\""),
    ),
    Case("init_adapter gone", ("gone: there is no such adapter directory.",), (LR, f"{LR}\n    init_adapter: gone")),
    Case(
        "init_adapter of another rank",
        (
            "ADAPTERS/rank2: model.layers.0.self_attn.q_proj has A (2, 192) and B (192, 2); ",
            "expected (4, 192) and (192, 4).",
        ),
        (LR, f"{LR}\n    init_adapter: ADAPTERS/rank2\n    adapter: {{target_modules: [q_proj, v_proj]}}"),
    ),
    Case(
        "init_adapter on other modules",
        ("ADAPTERS/rank4: model.layers.0.", "target_modules must be those it was trained with."),
        (LR, f"{LR}\n    init_adapter: ADAPTERS/rank4"),
    ),
    Case(
        "init_adapter pickled",
        ("ADAPTERS/pickled/adapter_model.bin: is a pickle file; save it as safetensors.",),
        (LR, f"{LR}\n    init_adapter: ADAPTERS/pickled"),
    ),
]

DATASET = [
    source("gone.jsonl", "gone.jsonl: there is no such file."),
    source("https://x.org/rows.jsonl", "https://x.org/rows.jsonl: is a URL; download it and name the file, "),
    source("{rows: 3}", at(11, "jobs.1.train_data.0"), "path is missing."),
    source("[{path: rows.jsonl, weight: -1}]", at(11, "jobs.1.train_data.0.weight"), "must be above 0, got -1."),
    source("[{path: rows.jsonl, weight: 0}, rows.jsonl]", at(11, "jobs.1.train_data.0.weight"), "above 0, got 0."),
    source("[{path: rows.jsonl, rows: 0}]", at(11, "jobs.1.train_data.0.rows"), "must be at least 1, got 0."),
    source("[{path: rows.jsonl, weight: 99}, rows.jsonl]", "two: train_data: rows.jsonl: its weight gives it none of"),
    source("row.jsonl", "row.jsonl: there is no such file. Did you mean rows.jsonl?"),
    source("'*.csv'", "*.csv: no file matches."),
    data("damaged", b"\x1f\x8b\x08 no more", "bad.jsonl.gz: cannot be read (", file="bad.jsonl.gz"),
    source('""', at(11, "jobs.1.train_data"), "no files; name at least one."),
    source("3", at(11, "jobs.1.train_data.0"), "expected text or mapping, got 3."),
    data("suffix", "x", "bad.docx: has the suffix '.docx'; accepted are .jsonl, ", file="bad.docx"),
    data("empty", "", "bad.jsonl: has no rows."),
    data("line 17", CHAT * 16 + '{"messages": [\n', "bad.jsonl line 17: is not valid JSON: it ends in the middle"),
    data(
        "role",
        CHAT + CHAT.replace("assistant", "helper"),
        "bad.jsonl line 2: messages[1].role is 'helper'; use system, ",
    ),
    data(
        "no answer",
        CHAT + '{"messages": [{"role": "user", "content": "a"}]}\n',
        "bad.jsonl line 2: messages has no assistant turn to learn from.",
    ),
    data(
        "mixed", CHAT + '{"text": "x"}\n', "bad.jsonl line 2: is in the text format, but the rows before it are chat."
    ),
    data(
        "preferences",
        '{"prompt": "x", "chosen": "a", "rejected": "b"}\n{"prompt": "x", "chosen": "a"}\n',
        "bad.jsonl line 2: has chosen and no rejected.",
    ),
    data("columns", "a,b\n1,2\n", "bad.csv line 2: has the columns a, b; expected messages (chat), ", file="bad.csv"),
    data(
        "bars",
        "prompt|completion\na|b\n",
        "bad.csv line 2: has the columns prompt|completion; ",
        "The cells of a .csv file are separated by commas, semicolons or tabs, those of a .tsv file by tabs.",
        file="bad.csv",
    ),
    data(
        "capitals",
        '{"Prompt": "a", "Completion": "b"}\n',
        "bad.jsonl line 1: has the columns Prompt, Completion; ",
        "Names are written in lower case: prompt, completion.",
    ),
    data("cells", "text\nx\ny,z\n", "bad.csv line 3: has 2 cells; the header has 1.", file="bad.csv"),
    data("latin-1", '{"text": "\xe9t\xe9"}\n'.encode("latin-1"), "bad.jsonl line 1: the byte 0xe9 is not UTF-8; save"),
    data(
        "list",
        '[{"text": "x"}]\n',
        "bad.jsonl line 1: a jsonl file has one object per line; name a file that is one list",
    ),
    data(
        "token",
        '{"input_ids": [1, 99999]}\n',
        "bad.jsonl line 1: token 1 is 99999, but the tokenizer knows 261 tokens.",
    ),
    data(
        "too long",
        CHAT + CHAT.replace('"b"', json.dumps("b" * 90)),
        "bad.jsonl line 2: has 95 tokens, but max_length is 64. ",
        "Raise max_length, or set long_samples to truncate or drop.",
        more="\n    long_samples: error",
    ),
    data(
        "masked",
        CHAT.replace('"b"', '"b", "weight": 0'),
        "bad.jsonl: there are no supervised tokens to train on: of 1 rows, 1 have no trained turn or text.",
    ),
    data(
        "cut off",
        '{"prompt": "%s", "completion": "y"}\n' % ("x" * 99),
        "bad.jsonl: there are no supervised tokens to train on: ",
        "1 have their answers past max_length 64.",
    ),
]

MODEL = [
    model(
        "gone", "there is no such model directory; accepted are tiny, smollm2, a directory with config.json, or a Hub"
    ),
    model("file", "is a file; give the model's directory."),
    model("no_config", "the directory has no config.json, so it is not a Hugging Face model."),
    model("broken_config", "config.json cannot be read (Expecting property name"),
    model("bad_setting", "config.json cannot be loaded: ", "'hidden_size' expected int, got str"),
    model("no_weights", "the directory has no .safetensors weights."),
    model("pickled", "the directory has no .safetensors weights. Convert its .bin files first."),
    model("corrupt", "model.safetensors is not a safetensors file, or its beginning is damaged."),
    model("cut_short", "model.safetensors is not a safetensors file, or its beginning is damaged."),
    model("other_size", "model.embed_tokens.weight has the shape (264, 192); config.json expects (264, 96)."),
    model("more_layers", "model.layers.6.input_layernorm.weight is not in the model's files, nor are 8 more weights."),
    model("own_code", "the model brings code of its own (auto_map); Weft runs no code from model files."),
    model("unknown_type", "config.json cannot be loaded: ", "model type `lllama`"),
    model("encoder_decoder", "t5 is an encoder-decoder; Weft trains decoder-only models."),
    model("no_tokenizer", "the tokenizer cannot be loaded: "),
    Case(
        "model word",
        ("base_model llama: there is no such model directory; accepted are tiny, ",),
        (BASE, "model: llama"),
    ),
    Case("model on the Hub", ("base_model owner/name: config.json cannot be loaded: ",), (BASE, "model: owner/name")),
    Case("model empty", (at(1, "base_model"), "is empty; write a name or a path."), (BASE, 'model: ""')),
    Case("model too long", (f"base_model {'x' * 300}: there is no such model",), (BASE, f"model: {'x' * 300}")),
]

OVERRIDES = [
    override("capacity", "'capacity' is not an override; write key=value, e.g. jobs.0.adapter.r=32."),
    override("=3", "'=3' is not an override; write key=value"),
    override("capacity=[", "capacity=[: the value of capacity is not valid: '['."),
    override("capacity=", "capacity=: has no value; write one, or null for the default."),
    override("capacity=0", "capacity=0: must be at least 2, got 0."),
    override("nope.deep=1", "nope.deep=1: nope: unknown setting."),
    override("base_model.x=1", "base_model.x=1: base_model holds no settings."),
    override("jobs.three.lr=1", "jobs.three.lr=1: jobs.three: there is no item 'three'; there are 0 to 1 (one, two)."),
    override("jobs.9.lr=1", "jobs.9.lr=1: jobs.9: there is no item '9'; there are 0 to 1 (one, two)."),
    override("jobs.two.lr=-1", "jobs.two.lr=-1: jobs.1.learning_rate: must be above 0, got -1.0."),
    override("jobs.two.lrr=1", "jobs.two.lrr=1: jobs.1.lrr: unknown setting. Did you mean lr?"),
    override("jobs.two.lora.r=999", "jobs.two.lora.r=999: jobs.1.adapter.r: rank 999 is above the smaller side of"),
    override(
        "defaults.cutoff_len=2000",
        "defaults.cutoff_len=2000: jobs.0.max_length: max_length 2000 is above the ",
        "positions (1024).",
    ),
    override("base_model=./gone", "base_model ./gone: there is no such model directory; "),
]

CASES = [*UNKNOWN, *ELSEWHERE, *FILE, *RUN, *ADAPTER, *JOB, *DATASET, *MODEL, *OVERRIDES]

VERBS = {
    ("config", "jobs.yaml", "jobs.two.lr=0"): "jobs.two.lr=0: jobs.1.learning_rate: must be above 0, got 0.0.",
    ("init",): "jobs.yaml: already exists. Use --force to replace it.",
    ("init", "rows.jsonl/jobs.yaml"): "rows.jsonl/data: a file is in the way where a directory is needed.",
    ("init", "x" * 300): f"{'x' * 300}: the name is too long.",
    ("demo", "--model", "huge"): "--model: got 'huge'; accepted are tiny and smollm2.",
    ("demo", "--out", "rows.jsonl"): "rows.jsonl: is a file; name a directory.",
    ("generate", "--adapter", "gone", "--prompt", "x"): "gone: there is no such adapter directory.",
    ("generate", "--base-model", "tiny", "--data", "gone.jsonl"): "gone.jsonl: there is no such file.",
    ("generate", "--base-model", "gone", "--prompt", "x"): "base_model gone: there is no such model directory; ",
    ("generate", "--base-model", "tiny", "--data", "jobs.yaml"): "jobs.yaml: has the suffix '.yaml'; accepted are",
    ("generate", "--base-model", "tiny", "--prompt", "x", "--dtype", "fp8"): "dtype: got 'fp8'; accepted are auto, ",
    ("eval", "--base-model", "tiny", "--data", "rows.jsonl", "--metric", "bleu"): "--metric: got 'bleu'; accepted",
    ("eval", "--base-model", "tiny", "--data", "gone.jsonl"): "gone.jsonl: there is no such file.",
    ("chat", "--base-model", "tiny", "--temperature", "-1"): "--temperature: must be 0 or at least 0.001, got -1.",
    ("generate", "--adapter", "rows.jsonl", "--prompt", "x"): "rows.jsonl: is a file; name the adapter's directory.",
    ("report", "rows.jsonl"): "rows.jsonl: is a file; name a run's directory.",
    ("export", "gone", "--for", "peft"): "gone: there is no such adapter directory.",
    ("export", "gone", "--for", "peft", "--out", "x" * 300): f"{'x' * 300}: the name is too long.",
    (
        "merge",
        "ADAPTERS/rank4",
        "--out",
        "new/model",
        "--base-model",
        "./gone",
    ): "base_model ./gone: there is no such model",
    ("merge", "ADAPTERS/pickled", "--out", "new/model"): "ADAPTERS/pickled/adapter_model.bin: is a pickle file; ",
    ("merge", "ADAPTERS/rank4", "--out", "rows.jsonl/model"): "rows.jsonl/model: a file is in the way",
    ("merge", "ADAPTERS/rank4", "--out", "rows.jsonl"): "--out rows.jsonl: already exists; name a new directory.",
}
"""Mistakes made with the other verbs, and how the sentence about each begins."""
