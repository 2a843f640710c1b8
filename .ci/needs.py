"""Which cells of a chapter others need: those that give the names they take."""

import ast, re, symtable

# how cells are read; what is found by a string later on
ALWAYS = re.compile(r"__future__|^\w+\.register\(", re.M)


def written(part, calls):
    """The names that a statement writes into: `x.a = …`, `x[i] = …` and a line `x.append(…)` write into `x`.

    `calls`: each call of a method does, as `y = x.pop()`."""
    lines = {id(n.value) for n in ast.walk(part) if isinstance(n, ast.Expr)}
    for n in ast.walk(part):
        call = isinstance(n, ast.Call) and (calls or id(n) in lines)
        base, inside = n.func if call else n, (ast.Attribute, ast.Subscript)
        if isinstance(base, inside) and (call or isinstance(base.ctx, ast.Store)):
            while isinstance(base, inside):
                base = base.value
            if isinstance(base, ast.Name):
                yield base.id


def python(source):
    "The syntax tree of a cell, an empty one for C++."
    try:
        return ast.parse(re.sub(r"^[%!].*$", "pass", source, flags=re.M))
    except SyntaxError:
        return ast.Module([], [])


def modules(source):
    "The names that a cell binds to modules, as `import a.b, c as d` does to `a` and `d`."
    names = (n.names for n in ast.walk(python(source)) if isinstance(n, ast.Import))
    return {a.asname or a.name.split(".")[0] for some in names for a in some}


def names_of(source, calls=False):
    """What a cell takes from the cells before it, what it makes and what it writes into (see `written`): three sets of names.

    It makes what it defines at its top or imports."""
    takes, makes, writes = set(), set(), set()
    for part in python(source).body:
        table = symtable.symtable(ast.unparse(part), "cell", "exec")
        tables = [table]
        for t in tables:
            tables += t.get_children()
        symbols = [(t, s) for t in tables for s in t.get_symbols() if s.is_referenced()]
        used = {s.get_name() for t, s in symbols if t is table or s.is_global()}
        first = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
        own = first if isinstance(part, (ast.For, ast.With, ast.Try, ast.If)) else set()
        takes |= used - makes - own
        makes |= first
        writes |= {*written(part, calls)} & used
    return takes, makes, writes


def named(sources, names):
    "Which cells, by index, speak of `names`."
    return {i for i, s in enumerate(sources) if {*names} & set().union(*names_of(s))}


def needed(sources, shown, calls=False):
    "Which of a chapter's cells, by index, those of `shown` need: themselves, and before each what makes a name it takes or writes into it."
    takes, makes, writes = zip(*(names_of(s, calls) for s in sources))
    # a call of a module's function, as torch.manual_seed(0), writes nothing into the module
    known = set().union(*map(modules, sources))
    gives = [m | (w - known) for m, w in zip(makes, writes)]
    keep = {*shown} | {i for i, s in enumerate(sources) if ALWAYS.search(s)}
    open_ = [*keep]
    while open_:
        i = open_.pop()
        for name in takes[i]:
            before = [j for j in range(i - 1, -1, -1) if name in gives[j]]
            after = [j for j in range(i + 1, max(shown, default=0)) if name in gives[j]]
            for j in before or after[:1]:  # what is called may be defined below its caller
                if j not in keep:
                    keep.add(j)
                    open_.append(j)
                if name in makes[j] and name not in takes[j]:
                    break  # made there; else only written into: go on to where it is made
    return keep
