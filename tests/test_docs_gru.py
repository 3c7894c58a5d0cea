"""The documentation is true of the code: its blocks run, and what it quotes stands in the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gru.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The others start from files; test_interop.py and test_golden_cli.py make them and run the pages.
PAGES = [page for page in PAGES if page.name not in ("exchange.md", "golden.md")]
SOURCES = ("gru_ref/ops/gru.py", "gru_ref/models/gru_lm.py")

# `function: variable` of gru_ref/ops/gru.py, `file.py: function`, or `file.py` alone
REFERENCE = re.compile(r"`(?:([\w/]+\.py)(?:: ([\w.]+))?|(\w+): (\w+))`")


def blocks(page):
    """The Python blocks of a page with the number of their first line."""
    text = page.read_text("utf-8")
    return [
        (text.count("\n", 0, match.start(1)), match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]


def prose(page):
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)


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
    names = set()
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
        ):
            names.add(node.value.id)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def is_python(line):
    try:
        ast.parse(line)
    except SyntaxError:
        return False
    return True


def quoted_lines(page):
    """The indented lines that are Python; the others are mathematics."""
    lines = [line.strip() for line in prose(page).splitlines() if re.match(r" {4,}\S", line)]
    return [line for line in lines if is_python(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, in an empty folder; line numbers of errors are the page's."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, source in blocks(page):
        code = compile("\n" * line + source, str(page), "exec")
        exec(code, namespace)


def test_the_page_has_blocks_references_and_quotes():
    """Were a pattern wrong, the tests below would have nothing to look at."""
    assert len(blocks(PAGE)) >= 6
    assert len(REFERENCE.findall(prose(PAGE))) >= 20
    assert len(quoted_lines(PAGE)) >= 18


def test_every_function_and_variable_that_the_page_names_exists():
    for path, function, in_gru, variable in REFERENCE.findall(prose(PAGE)):
        path, function = path or SOURCES[0], function or in_gru
        assert (ROOT / path).is_file(), path
        if function:
            assert function in functions(path), f"{path}: {function}"
        if variable:
            assert variable in assigned(functions(path)[function]), f"{function}: {variable}"


def test_every_line_that_the_page_quotes_stands_in_the_source():
    source = [line for path in SOURCES for line in (ROOT / path).read_text("utf-8").splitlines()]
    code = {line.split("  #")[0].strip() for line in source}
    assert [line for line in quoted_lines(PAGE) if line not in code] == []


def test_every_gradient_that_backward_returns_is_explained():
    """Each name that `backward` assigns beside the sizes and the unpacked cache occurs in the page."""
    backward = functions(SOURCES[0])["backward"]
    text = PAGE.read_text("utf-8")
    assert {name for name in assigned(backward) if name.startswith("d") and name not in text} == set()


def test_the_test_of_names_notices_a_name_that_is_gone():
    assert "da_n" in assigned(functions(SOURCES[0])["backward"])
    assert "dgates_h" in assigned(functions(SOURCES[0])["_cell_reset_after_backward"])
    assert "da_m" not in assigned(functions(SOURCES[0])["backward"])
    assert REFERENCE.findall("(`backward: da_n`, its)") == [("", "", "backward", "da_n")]
