"""Values that `tools/fuzz_options.py` gives flags and YAML entries: right and wrong ones of every type."""

from __future__ import annotations

UNMEANT = (
    "nan", "inf", "-inf", "1e400", "99999999999999999999", "-99999999999999999999", str(2**63), "-" + str(2**64),
)  # fmt: skip
"""Numbers that nothing can mean."""
NUMBERS = (
    *UNMEANT, "0", "-1", "-5", "1", "2", "3", "7", "16", "0.5", "1.5", "1e-6", "1e6", "0x10", "1000000000",
    "4611686018427387904", "1_000", "1e308", "-0", "+3", "4k", "", " ", "1 2", "9" * 5000, "٣", "None", "True",
)  # fmt: skip
TEXTS = (
    "", " ", "x", "x" * 5000, "/" + "d/" * 3000, "é漢\u202e", "\udc80", "a\nb", "%s %(x)s", "{", "{rollout_id}",
    "{0.__class__}", "{rollout_id!x}", "~nobody-here/x", "..", "/", "/dev/null", "/dev/zero", "/proc/self/mem",
    "model", "data.jsonl", "fifo", "none", "null", "@[0:1]", "data.jsonl@[1:]", "data.jsonl@[x]", "data.jsonl@[5:2]",
    "data.jsonl@[::0]", "model/config.json", "broken.yaml", "--", "-", "a" * 255, "a\0b", "math", "boxed_math",
    "dapo", "{rollout_id}_{rank}.pt", "{rollout_id:>99999999999}.pt", "{rollout_id:d}", "{{x}}", "{}", "{rank}",
)  # fmt: skip
FUNCTIONS = (
    "builtins.print", "builtins:int", "builtins:type", "sys:exit", "math:sqrt", "os.path:join", "os:environ",
    "json:JSONDecoder", "typing:Any", "nosuch:fn", "nosuch.fn", "a:b:c", ":", ".", "..", ":x", "x:", "x.py", ".py",
    "own.py", "own.py:", "own.py:f", "own.py:a.b", "own.py:nothing", "own.py:klass", "own.py:lazy", "own.py:broken",
    "own.py:raises", "own.py:odd", "own.py:Odd", "own.py:rude", "own.py:mute", "shy.py", "shy.py:f", "bad.py:f",
    "exits.py:f", "dir.py:f", "model:fn", "functools:partial", "operator:itemgetter",
    "own.py:f.__call__", "collections:OrderedDict", "itertools:chain", "x" * 300 + ".py:f", "x" * 5000 + ":f",
    "a\0b:f", "\udc80:f", "builtins:True", ".own:f", "slime.:f", "slime.rollout.sglang_rollout:generate_rollout",
    "slime.rollout.sft_rollout:generate_rollout", "datetime:datetime.now", "types:FunctionType",
)  # fmt: skip
JSONS = (
    "{}", "[]", "null", "1", '{"a":', '{"a": 1e999}', '{"a": NaN}', '{"": 1}', '{"a": null}', '{"a": {"b": [1]}}',
    "[" * 100000, '{"a":' * 5000, '{"a": 1, "a": 2}', '{"enable_thinking": false}', '{"A B": 1}', '{"A": "\\u0000"}',
    '{"a=b": "c"}', '{"PATH": 1}', '{"a": "\\ud800"}', "{" + '"a": ' + "9" * 5000 + "}", '{"rope_theta": "x"}',
    '{"max_position_embeddings": null}', '{"num_hidden_layers": -1}', '{"context_length": "x"}', '{"model_type": 5}',
)  # fmt: skip
YAML_VALUES = (
    "null", "~", "true", "false", "0", "-1", "3", "0.5", ".nan", ".inf", "-.inf", "[]", "{}", "[[1]]", "[null]",
    "{a: {b: c}}", "text", "''", "2020-01-01", "1" + "0" * 30, '"\\0"', "!!binary aGk=", "[1, x, .nan]", "!!set {a}",
    "1:30", "0o7", "1e6", "x" * 5000, "{1: 2}", "[[[[[]]]]]", "'data.jsonl'",
)  # fmt: skip
BROKEN = (
    b"\xff\xfe\x00", b"- a\n- b\n", b"text", b"5", b"a: b: c", b"\ta: 1", b"",
    b"!!python/object/apply:os.system ['true']", b"a: \x00", b"{", b"? [a]\n: 1", b"1: 2", b"null: 1", b"*x",
    b"a: &x [*x]", b"%YAML 9", b"\xef\xbb\xbflr: 1", "lr: 1".encode("utf-16"), b"[" * 20000, b"a: 2020-99-99",
    b"lr: 1\nlr: 2", b"datasets: 5", b"datasets: [5]", b"datasets: [{name: 5}]", b"eval: {datasets: {}}",
    b"datasets: {a: null}", b"datasets: {a: {path: 5}}", b"defaults: 3\ndatasets: {a: {}}", b"datasets: &x [*x]",
)  # fmt: skip
ENVIRONMENT = {
    "HF_HOME": ("/nowhere", "data.jsonl", ""),
    "RAY_ADDRESS": ("", "nonsense", "x:y:z"),
    "CUDA_VISIBLE_DEVICES": ("", "x", "-1"),
    "WANDB_MODE": ("nonsense", ""),
    "SLIME_ROUTER_API_KEY": ("", "\udc80", "a\nb"),
    "http_proxy": ("nonsense", ""),
    "no_proxy": ("*", ","),
    "OMP_NUM_THREADS": ("x", "-1"),
}
OWN = """
async def f(args, sample, **kwargs): return 1.0
class klass: pass
def raises(*a, **k): raise ValueError
class a: b = 3
broken = 5
class Meta(type):
    def __getattribute__(cls, name): raise RuntimeError(name)
class Odd(metaclass=Meta): pass
class Objects:
    def __getattr__(self, name): raise RuntimeError(name)
    def __call__(self, *a, **k): return 1.0
odd = Objects()
class Rude:
    def __repr__(self): raise RuntimeError("repr")
def rude(x=Rude()): pass
class Mute(Exception):
    def __str__(self): raise RuntimeError("str")
def mute(*a, **k): raise Mute
def __getattr__(name):
    if name == "lazy": raise RuntimeError("x")
    raise AttributeError(name)
"""
SHY = "def __getattr__(name): raise RuntimeError(name)"
"""A module that cannot be asked for anything."""
