"""docs/gpt2.md is true of the code: its blocks run, and what it quotes and names stands in the source."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpt2.md").read_text("utf-8")
OPS = ("attention", "attention_blocked", "cross_entropy", "gelu", "layer_norm")
SOURCES = [*(f"gru_ref/ops/{op}.py" for op in OPS), "gru_ref/models/gpt2.py"]

FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PROSE = FENCE.sub("", PAGE)
# `file.py` or `file.py: function`; `operation.function: variable`
FILES = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")
VARIABLES = re.compile(r"`(\w+)\.(\w+): (\w+)`")


def functions(path):
    """Name, with its class, -> definition, of every function of a source file."""
    found = {}
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}": f for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


def assigned(function):
    """Names that a function assigns, whole or in part: `a`, `a[...]`, `a, b = …`."""
    stored = [node for node in ast.walk(function) if isinstance(getattr(node, "ctx", None), ast.Store)]
    targets = [node.value if isinstance(node, ast.Subscript) else node for node in stored]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def quoted_lines():
    """The indented lines that are Python; the others are mathematics."""
    lines = [line.strip() for line in PROSE.splitlines() if re.match(r" {4,}\S", line)]
    return [line for line in lines if is_python(line)]


def is_python(line):
    try:
        ast.parse(line)
    except SyntaxError:
        try:  # outside a function there is no return
            ast.parse(f"def f():\n {line}")
        except SyntaxError:
            return False
    return True


def test_every_block_runs_in_the_order_of_the_page():
    namespace = {}
    for match in FENCE.finditer(PAGE):
        line = PAGE.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], "docs/gpt2.md", "exec"), namespace)


def test_the_page_has_blocks_references_and_quotes():
    """Were a pattern wrong, the tests below would have nothing to look at."""
    assert len(FENCE.findall(PAGE)) >= 5
    assert len(FILES.findall(PROSE)) >= 6
    assert len(VARIABLES.findall(PROSE)) >= 15
    assert len(quoted_lines()) >= 25


def test_every_file_function_and_variable_that_the_page_names_exists():
    for path, function in FILES.findall(PROSE):
        assert (ROOT / path).is_file(), path
        assert not function or function in functions(path), f"{path}: {function}"
    for op, function, variable in VARIABLES.findall(PROSE):
        assert variable in assigned(functions(f"gru_ref/ops/{op}.py")[function]), (
            f"{op}.{function}: {variable}"
        )


def test_every_line_that_the_page_quotes_stands_in_the_source():
    source = [line for path in SOURCES for line in (ROOT / path).read_text("utf-8").splitlines()]
    code = {line.split("  #")[0].strip() for line in source}
    assert [line for line in quoted_lines() if line not in code] == []


def test_the_test_of_names_notices_a_name_that_is_gone():
    backward = functions("gru_ref/ops/attention_blocked.py")["backward"]
    assert {"delta", "dq", "p_kept", "i"} <= assigned(backward)
    assert not {"softmax", "dz"} & assigned(backward)
    assert VARIABLES.findall("(`attention.backward: ds`, its)") == [("attention", "backward", "ds")]
