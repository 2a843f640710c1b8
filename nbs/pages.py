"""What the reference pages are made with: tables in Markdown, and checks of the commands and calls that they show.

A table is made from the code that it describes, whenever its page runs; `tests/test_docs.py` runs the pages and compares."""

import argparse, ast, contextlib, functools, importlib, inspect, io, json, re, shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from IPython.display import Markdown


def cell(text) -> str:
    "`text` as a cell of a table."
    return " ".join(str(text).split()).replace("|", "\\|")


def table(rows: Iterable[Iterable], *heads: str) -> Markdown:
    "`rows` under `heads`, as a table in Markdown."
    lines = [heads, ["---"] * len(heads), *rows]
    return Markdown("\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines))


# --- commands and flags


def actions(command: str) -> list[argparse.Action]:
    "What a command takes, in the order of its help; without --help and flags that its help does not have."
    from batchlab.cli.flags import bench_parser, parser_of

    parser = bench_parser() if command == "bench" else parser_of(command)
    return [a for a in parser._actions if a.dest != "help" and a.help != argparse.SUPPRESS]


def spelled(a: argparse.Action) -> str:
    "A flag with its value, or an argument without a dash, as one types it."
    value = "" if a.nargs == 0 else "{" + ",".join(map(str, a.choices)) + "}" if a.choices else ""
    if a.nargs != 0 and not a.choices:
        value = str(a.metavar or a.dest.upper())
    if not a.option_strings:
        return f"`{value or a.dest.upper()}`"
    names = ", ".join(f"`{s}`" for s in a.option_strings)
    return f"{names} `{value}`" if value else names


def flag_rows(found: Iterable[argparse.Action]) -> list[tuple[str, str]]:
    return [(spelled(a), (a.help or "").replace("%%", "%")) for a in found]


# --- what a page shows is true


def find(node: ast.expr):
    "What a name such as `llm.generate` or `batchlab.core.blocks.BlockPool` is, for a variable an attribute of its class."
    import batchlab

    objects = dict(
        llm=batchlab.LLM, outs=batchlab.Outputs, allm=batchlab.AsyncLLM, batchlab=batchlab
    )
    if isinstance(node, ast.Name):
        return objects.get(node.id) or getattr(batchlab, node.id)
    owner = find(node.value)
    if hasattr(owner, "__path__") and not hasattr(owner, node.attr):
        return importlib.import_module(f"{owner.__name__}.{node.attr}")
    return getattr(owner, node.attr)


def check_call(code: str) -> str:
    "Fail unless all that `code` calls is there and takes these arguments; otherwise the name of the outermost."
    top = ast.parse(code, mode="eval").body
    for node in ast.walk(top):
        if not isinstance(node, ast.Call):
            continue
        f = node.func
        of_class = (
            isinstance(f, ast.Attribute)
            and isinstance(f.value, ast.Name)
            and f.value.id != "batchlab"
        )
        given = [None] * (len(node.args) + of_class)
        inspect.signature(find(f)).bind(*given, **{k.arg: None for k in node.keywords})
    outermost = top.func if isinstance(top, ast.Call) else top
    find(outermost)
    return ast.unparse(outermost)


def check_command(line: str) -> str:
    "Fail unless the command line takes it; its first two words."
    from batchlab import cli
    from batchlab.cli.flags import bench_parser

    args = shlex.split(line)[1:]
    parse = bench_parser().parse_args if args[0] == "bench" else cli.parse_args
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            parse(args[1:] if args[0] == "bench" else args)
        except SystemExit as e:
            assert not e.code, line  # --help says what there is, and ends
    return f"batchlab {args[0]}"


def commands(text: str) -> Iterator[str]:
    "The commands of batchlab in the shell blocks of a page's `text`."
    for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            tokens = shlex.shlex(line, posix=False, punctuation_chars="|&;<>")
            tokens.whitespace_split, words = True, []
            for word in [*tokens, ";"]:
                if set(word) <= set("|&;<>"):
                    if "batchlab" in words:
                        yield " ".join(words[words.index("batchlab") :])
                    words = []
                else:
                    words.append(word)


@functools.cache
def there() -> tuple[set[str], set[str], set[str]]:
    "The flags of all commands, the server's routes with ID for what varies, and the names of all attributes and functions."
    import batchlab
    from batchlab.cli.flags import COMMANDS

    files = Path(batchlab.__file__).parent.rglob("*.py")
    source = "".join(p.read_text(encoding="utf-8") for p in files)
    flags = {s for c in COMMANDS for a in actions(c) for s in a.option_strings}
    routes = {re.sub(r"\{.*?\}", "ID", r) for r in re.findall(r'"(/v1/[^"]*)"', source)}
    return flags, routes, {*re.findall(r"(?:\bself\.|\bdef )(\w+)", source)}


def misused(node: ast.AST, attributes: set[str]) -> Iterator[str]:
    "Arguments that a call in prose has and its function has not; attributes of an `LLM` that no code has."
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("llm", "allm"):
        if node.attr not in attributes:
            yield ast.unparse(node)
    elif isinstance(node, ast.Call):
        name, _, rest = ast.unparse(node.func).partition(".")
        of_class = name in ("llm", "allm", "batchlab") and rest.isidentifier()
        if of_class or name.endswith(("LLM", "Params")) and not rest:
            taken = inspect.signature(find(node.func)).parameters.values()
            known = {p.name for p in taken}
            if not any(p.kind == p.VAR_KEYWORD for p in taken):
                yield from (
                    f"{name}({k.arg}=…)" for k in node.keywords if k.arg and k.arg not in known
                )


def misnamed(text: str) -> Iterator[str]:
    "Commands, flags, routes and arguments that prose names and that are not there."
    flags, routes, attributes = there()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for line in [*commands(text), *(s for s in spans if re.match("batchlab [a-z]", s))]:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                check_command(line)
        except SystemExit:  # of --help
            continue
        except Exception as e:  # but a span may leave out what a command needs
            if not re.search("required|needs|expected one argument", str(e)):
                yield f"{line}: {e}"
    named = {f for s in spans if s.startswith("--") for f in re.findall(r"--[a-z][\w-]*", s)}
    yield from (named - flags) | ({*re.findall(r"/v1/[\w/]+", text)} - routes)
    for code in [*spans, *re.findall(r"```python\n(.*?)```", text, re.S)]:
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse("" if "vllm" in code else code)):
                yield from misused(node, attributes)


def check_page(name: str) -> dict[str, int]:
    "Parse each command that page `name` shows with the command line's own parser, and compile its Python: how many there are."
    nb = json.loads(Path(f"{name}.ipynb").read_text(encoding="utf-8"))
    text = "\n".join("".join(c["source"]) for c in nb["cells"] if c["cell_type"] == "markdown")
    python = re.findall(r"```python\n(.*?)```", text, re.S)
    for code in python:
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return dict(commands=len([*map(check_command, commands(text))]), python=len(python))
