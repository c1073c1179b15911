"""A page as a reader's program sees it: a tree of elements, parsed by the standard library."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Element | str"] = field(default_factory=list)

    def walk(self) -> Iterator["Element"]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str) -> list["Element"]:
        return [element for element in self.walk() if element.tag == tag]

    def by_id(self, anchor: str) -> "Element":
        (found,) = (element for element in self.walk() if element.attributes.get("id") == anchor)
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def rows(self) -> list[list[str]]:
        """The body of a table as texts, row headers first."""
        (body,) = self.all("tbody")
        return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in body.all("tr")]

    def table(self, caption: str) -> "Element":
        (found,) = (table for table in self.all("table") if table.all("caption")[0].text == caption)
        return found


class _Builder(HTMLParser):
    """Builds the tree and refuses what a browser would have to repair: a tag closed out of turn or never."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


Page = Element


def parse(html: str) -> Page:
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert [element.tag for element in builder.open] == ["document"], "an element was never closed"
    return builder.open[0]
