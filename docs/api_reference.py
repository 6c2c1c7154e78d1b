"""Generate the API reference from the source: one page for each public module, read without importing it.

MkDocs calls `on_config` and `on_files`; griffe, which reads the source for mkdocstrings, calls `Docstrings`. The public
names are those of `__all__`, so nothing is listed here. The build fails if a public name has no docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, NamedTuple

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = "wholebatch"
NESTED = (
    "app",
    "app.tensors",
    "auditing",
    "integrations.grad_cache",
    "integrations.flag_embedding",
    "integrations.ms_swift",
    "integrations.insightface",
    "integrations.lightning",
    "integrations.lightly",
    "integrations.open_clip",
    "integrations.pylate",
    "integrations.pytorch_metric_learning",
    "integrations.sentence_transformers",
    "integrations.tevatron",
    "integrations.transformers",
    "jax",
    "jax.reference",
)  # public modules that `wholebatch.__all__` does not name

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`([^`]+)`")
_FORMULA = re.compile(r"(?:^|(?<=\n\n))(\w[\w/()']* += \S.*(?:\n\S.*)*)(?=\n\n|$)")  # a paragraph that is an equation
_TABLE = re.compile(r"(?:^|(?<=\n\n))((?:[^\s>`][^\n]*?\S {3,}\S[^\n]*(?:\n|$))+)(?=\n|$)")  # aligned columns
_RETURNS = re.compile(r"(?<=\n)Returns:\n[ \t]+")
_DOCTEST = re.compile(r"((?:^|(?<=\n))[ \t]*>>> .*(?:\n[ \t]*\S.*)*)")


def read() -> griffe.Module:
    """Return the package as griffe reads it."""
    extensions = griffe.load_extensions(f"{__file__}:Docstrings")
    return griffe.load(PACKAGE, search_paths=[SOURCE], resolve_aliases=True, extensions=extensions)


def public_modules(package: griffe.Object) -> dict[str, list[str]]:
    """Return the public names of each public module, by the module's path."""
    top = _exports(package["_torch_names"])
    modules = [name for name in top if _target(package[name]).is_module]
    found = {PACKAGE: [name for name in top if name not in modules]}
    for name in [*modules, *NESTED]:
        module = package[name]
        submodules = {f"{name}.{member}" for member in _exports(module)} & set(NESTED)
        found[f"{PACKAGE}.{name}"] = [m for m in _exports(module) if f"{name}.{m}" not in submodules]
    return found


def undocumented(package: griffe.Object, modules: dict[str, list[str]]) -> list[str]:
    """Return the public modules, names and methods that have no docstring."""
    missing = []
    for path, names in modules.items():
        module = _module(package, path)
        missing += [path] * (not module.has_docstring)
        for name in names:
            value = package[_member(module, name).target.removeprefix(f"{PACKAGE}.")]
            missing += [f"{path}.{name}"] * (not value.has_docstring and not value.is_attribute)
            if value.is_class:
                missing += [
                    f"{path}.{name}.{member.name}"
                    for member in value.members.values()
                    if member.is_function and not member.name.startswith("_") and not member.has_docstring
                    if not _documented_by_base(value, member.name)
                ]
    return missing


def prefer_imports(package: griffe.Module) -> None:
    """Point `from .audit import audit` at the function, where griffe takes the module of the same name."""
    for name, member in package["_torch_names"].members.items():
        if member.is_alias and member.target_path.startswith(f"{PACKAGE}."):
            found = package[member.target_path.removeprefix(f"{PACKAGE}.")]
            if not found.is_alias and found.is_module and name in found.members:
                member.target = found.members[name]


def declare_settings(package: griffe.Module) -> None:
    """Give classes whose constructor takes their annotated attributes by keyword the signature that editors show."""
    module = package["losses._module"]
    for cls in [cls for one in _modules(package) for cls in one.classes.values() if not cls.is_alias]:
        bases = [*reversed(cls.mro()), cls]
        if module["Settings"] not in bases or "__init__" in cls.members or cls is module["Settings"]:
            continue
        fields: dict[str, griffe.Parameter] = {}
        for name, field in ((name, field) for base in bases for name, field in base.attributes.items()):
            if "property" not in field.labels and not name.startswith("_"):
                kind = griffe.ParameterKind.keyword_only
                fields[name] = griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
        this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        init = griffe.Function("__init__", parameters=griffe.Parameters(this, *fields.values()), lineno=cls.lineno)
        cls.set_member("__init__", init)


def declare_arguments(package: griffe.Module) -> None:
    """Give adapters' losses, which declare their arguments as attributes, the constructor that AdaptedLoss makes."""
    adapted, kinds = package["integrations._options.AdaptedLoss"], griffe.ParameterKind
    options = package["contract.options.BatchOptions"].attributes
    defaults = package["contract.options.Options"].attributes
    for cls in [cls for module in _modules(package) for cls in module.classes.values() if not cls.is_alias]:
        bases = [base for base in (*reversed(cls.mro()), cls) if adapted in base.mro()]
        if cls not in bases:
            continue
        members = {name: x for base in bases for name, x in base.members.items() if not name.startswith("_")}
        fields = {name: x for name, x in members.items() if "instance-attribute" in x.labels}
        fixed = " ".join(str(base.keywords.get("fixed", "")) for base in bases)
        names = [name for name in fields if f"'{name}'" not in fixed]
        ordered: list[str] = []
        for base in bases:
            own, positional = [name for name in base.members if name in names], base.keywords.get("positional")
            ordered = [*ordered, *own] if positional is None else ast.literal_eval(str(positional)).split()
        ordered = [name for name in ordered if name in names]
        parameters = [griffe.Parameter("self", kind=kinds.positional_or_keyword)]
        for name in [*ordered, *(name for name in names if name not in ordered)]:
            kind, field = kinds.positional_or_keyword if name in ordered else kinds.keyword_only, fields[name]
            parameters.append(griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value))
        taken = [str(base.keywords["options"]) for base in bases if "options" in base.keywords]
        for name in [name for name in options if not taken or f"'{name}'" in taken[-1]]:
            kind, annotation, default = kinds.keyword_only, options[name].annotation, defaults[name].value
            parameters.append(griffe.Parameter(name, annotation=annotation, kind=kind, default=default))
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), lineno=cls.lineno)
        cls.set_member("__init__", init)


def name_options(package: griffe.Module) -> None:
    """Give functions with `**options: Unpack[SomeOptions]` the parameters that this TypedDict declares."""
    defaults = package["contract.options.Options"].attributes
    for function in [function for module in _modules(package) for function in _functions(module)]:
        last = [*function.parameters][-1:]
        match = re.fullmatch(r"Unpack\[(\w+)\]", str(last[0].annotation)) if last else None
        if match is None:
            continue
        del function.parameters[last[0].name]
        options = _target(function.module[match[1]])
        bases = [*reversed(options.mro()), options]
        for field in {name: field for base in bases for name, field in base.attributes.items()}.values():
            default = defaults[field.name].value if field.name in defaults else "..."
            kind = griffe.ParameterKind.keyword_only
            function.parameters.add(
                griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=default)
            )


def _functions(found: griffe.Module | griffe.Class) -> list[griffe.Function]:
    """Return the functions of a module or class, and those of its classes."""
    classes = [cls for cls in found.classes.values() if not cls.is_alias]
    functions = [function for function in found.functions.values() if not function.is_alias]
    return [*functions, *(method for cls in classes for method in _functions(cls))]


def _modules(package: griffe.Module) -> list[griffe.Module]:
    """Return a package's modules, those of its packages too."""
    found = [module for module in package.modules.values() if not module.is_alias]
    return [package, *(inner for module in found for inner in _modules(module))]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the generated pages into the navigation, where `mkdocs.yml` says `API: generated`."""
    pages = [{_title(path): f"api/{path}.md"} for path in public_modules(read())]
    config.nav = [{"API reference": pages} if entry == {"API": "generated"} else entry for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each public module; refuse to build if a public name has no docstring."""
    package = read()
    modules = public_modules(package)
    missing = undocumented(package, modules)
    if missing:
        raise PluginError(f"public names without a docstring: {', '.join(missing)}")
    paths = {path: {name: _member(_module(package, path), name) for name in names} for path, names in modules.items()}
    documented = {found.target: found.path for path in paths if path != PACKAGE for found in paths[path].values()}
    for path, members in paths.items():
        text = f"# {_title(path)} {{#{path}}}\n\n::: {path}\n    options:\n      members: false\n"
        text += "      show_root_heading: false\n      show_root_toc_entry: false\n\n"
        also = []
        for name, found in sorted(members.items(), key=lambda item: item[0].lower()):
            if path == PACKAGE and found.target in documented:
                there = documented[found.target]
                unknown = there.endswith(f".{name}.{name}")  # mkdocstrings does not know this alias
                also.append(f"[](){{#{path}.{name}}}" * unknown + f"[`{_title(path)}.{name}`][{there}]")
            else:
                text += f"[](){{#{path}.{name}}}\n\n" * (found.path != f"{path}.{name}") + f"::: {found.path}\n\n"
        if also:
            text += "## Names that their modules document\n\n" + ", ".join(also) + "\n"
        files.append(File.generated(config, f"api/{path}.md", content=text))
    return files


def on_post_page(output: str, page: Page, **_: Any) -> None:
    """Refuse to build a page that loads a script from another host."""
    if script := re.search(r"<script[^>]*\ssrc=[\"']?(?:https?:)?//[^>]*>", output):
        raise PluginError(f"{page.file.src_path} loads a script from elsewhere: {script[0]}")


class Docstrings(griffe.Extension):
    """Turn roles such as :func:`name` into cross-references and doctests into blocks of code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Settle names that are both a module and imported from it."""
        if pkg.name == PACKAGE:
            names = pkg["_torch_names"]
            prefer_imports(pkg)
            for name in _exports(names):
                if name not in pkg.members:  # griffe cannot expand `import *` of a computed `__all__`
                    pkg.set_member(name, griffe.Alias(name, names[name]))
            for name in _exports(pkg["functional"]):
                assert name in pkg["functional"].members, name
            declare_settings(pkg)
            declare_arguments(pkg)
            name_options(pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has read."""
        if obj.docstring is None:
            return
        text = _DOCTEST.sub(_fenced, obj.docstring.value)
        text = _FORMULA.sub(r"```text\n\1\n```", text)
        if obj.is_module:
            text = _TABLE.sub(r"```text\n\1```\n", text + "\n")
        if obj.is_function and obj.returns is not None:  # or its text up to a colon would be read as the type
            text = _RETURNS.sub(lambda start: f"{start[0]}{obj.returns}: ", text)
        obj.docstring.value = _ROLE.sub(lambda role: _reference(role[1], obj), text)


def _reference(name: str, of: griffe.Object) -> str:
    """Return Markdown that links a name, as the docstring of `of` sees it."""
    shown = name.removeprefix("wholebatch.").lstrip("~.")
    if name.startswith(PACKAGE):
        return f"[`wb.{shown}`][{name}]"
    scope = of if of.is_class else of.parent
    inside = scope is not None and scope.is_class and name in scope.members
    return f"[`{name}`][{scope.path}.{name}]" if inside and scope is not None else f"`{name}`"


def _fenced(block: re.Match[str]) -> str:
    indent = re.match(r"[ \t]*", block[1])
    assert indent is not None
    return f"{indent[0]}```pycon\n{block[1]}\n{indent[0]}```"


def _title(path: str) -> str:
    return path.replace(PACKAGE, "wb", 1)


def _exports(module: griffe.Object) -> list[str]:
    """Return `__all__`, also where it is computed from the names of the module and from lists of others."""
    if module.exports:
        lists = {str(name): module[str(name)].target_path for name in module.exports if not isinstance(name, str)}
        return [
            exported
            for name in map(str, module.exports)
            for exported in (_exports(_of_list(module, lists[name])) if name in lists else [name])
        ]
    assigned = [
        node.value
        for node in ast.walk(ast.parse(Path(str(module.filepath)).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not assigned and "_names" in module.members:  # a package that loads its names when they are used
        return _exports(module["_names"])
    if not assigned:
        raise PluginError(f"{module.path} has no __all__")
    names: dict[str, Any] = {"globals": lambda: [name for name in module.members if name.isidentifier()]}
    return list(eval(ast.unparse(assigned[0]), names))


def _of_list(module: griffe.Object, path: str) -> griffe.Object:
    """Return the module whose `__all__` is imported by this path."""
    return module.package[path.removesuffix(".__all__").removeprefix(f"{PACKAGE}.")]


def _target(value: Any) -> Any:
    return value.final_target if value.is_alias else value


class _Member(NamedTuple):
    path: str  # by which the reference names it
    target: str  # where it is defined


def _module(package: griffe.Module, path: str) -> griffe.Object:
    return package if path == PACKAGE else _target(package[path.removeprefix(f"{PACKAGE}.")])


def _member(module: griffe.Object, name: str) -> _Member:
    """Return where a public name is; of a module that holds a function of its name, the function."""
    value = _target(module[name])
    if value.is_module and name in value.members:
        return _Member(f"{value.path}.{name}", _target(value[name]).path)
    return _Member(f"{module.path}.{name}", value.path)


def _documented_by_base(of: Any, name: str) -> bool:
    """Return whether a base class documents a method; griffe has not read `torch.nn.Module`, which may be one."""
    if name in ("extra_repr", "forward"):
        return True
    return any(name in base.members and base.members[name].has_docstring for base in of.mro())
