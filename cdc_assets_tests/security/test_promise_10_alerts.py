"""Promise 10: alerts always get out, whatever a name holds."""

from __future__ import annotations

import email.policy
import json
import re
from dataclasses import replace
from email import message_from_string
from io import StringIO
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console
from rich.table import Table

from cdc_assets.cli import terminal
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.checks.lag import check_lag
from cdc_assets.dagster.checks.ready import check_ready
from cdc_assets.dagster.metadata import described_metadata
from cdc_assets.dagster.names import all_tables
from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import header, of_markdown, plain
from cdc_assets.messages.texts import markdown as as_markdown
from cdc_assets.observe.condition import Condition
from cdc_assets.observe.notices import Memory, due, observe
from cdc_assets.observe.outbox import deliver
from cdc_assets.observe.report import Health, Problem, markdown
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.postgres.comments import Described, DescribedColumn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.alerts import START, config_of, to_mail, to_webhook, wrong
from cdc_assets_tests.support.sinks import mailbox, webhook

HOSTILE = (
    "\\[bold]x[/bold]\\",
    "[link=http://evil]x[/]",
    "\x1b]0;owned\x07\x1b[2J\r\nBcc: all@example.com\r\n\r\nbody",
    "![x](http://evil/p.png) [y](javascript:z) <img src=http://evil/q> | `a` www.evil.example",
    "<!channel> <http://evil|here> *b* _i_ &lt; :smile:",
    "\u202egnp.exe\u2028\u2029\x9b31m\x00\udcff",
    ".\r\n.\r\nQUIT",
    "x" * 100_000,
    "\U0001f4a5" * 50_000,
    '"' * 200,
)
NAMES = st.text(max_size=300) | st.text(
    alphabet="\x1b\\[]()!<>|`*_&#~:/@.w \r\n\x00a{}\"'\u202e\ud800", max_size=80
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def _told(config: SourceConfig, found: list[Condition]) -> tuple[Memory, list[str]]:
    memory, _ = due(observe(Memory(), found, START), config.alerts, START)
    return deliver(config, Memory.load(memory.dump()))


def _as_sent(body: dict[str, Any]) -> str:
    """All that a webhook's message says."""
    return json.dumps(body, ensure_ascii=False)


_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")


@settings(max_examples=40)
@given(NAMES)
@example(HOSTILE[2])
@example(HOSTILE[5])
@example(HOSTILE[7])
@example(HOSTILE[8])
def test_every_sink_takes_a_message_about_any_name(name: str) -> None:
    _sent_everywhere(name)


def _sent_everywhere(name: str) -> None:
    with webhook() as slack, mailbox() as mail:
        config = config_of(to_webhook(slack), to_mail(mail), {"type": "log"})
        memory, problems = _told(config, [wrong(name)])
        assert (memory.outbox, problems) == ({}, [])
    [body], [text] = slack.received, mail.received
    said = _as_sent(body)
    assert len(said) < 40_000
    for part in [body["text"], *(a[k] for a in body["attachments"] for k in ("title", "text"))]:
        assert not _OBEYED.search(part)
        assert "<" not in part and ">" not in part
    assert (body["mrkdwn"], body["unfurl_links"], body["unfurl_media"]) == (False, False, False)
    assert max(map(len, text.encode().split(b"\r\n"))) < 998
    read = message_from_string(text, policy=email.policy.default)
    assert sorted(read.keys()) == sorted(
        ["Subject", "From", "To", "Content-Type", "Content-Transfer-Encoding", "MIME-Version"]
    )
    subject = str(read["Subject"]).strip()  # it may begin with a fold
    assert subject.startswith("[cdc shop] FAIL: ")
    assert not _OBEYED.search(subject)


def test_a_great_many_tables_with_long_names_and_reasons_fit_every_sink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[dict[str, str]] = []

    class Client:
        def publish(self, **message: str) -> None:
            published.append(message)

    monkeypatch.setattr("boto3.client", lambda *_, **__: Client())
    names = [f'public."{"&é" * 30}{number}"' for number in range(600)]
    with webhook() as slack, mailbox() as mail:
        topic = {"type": "sns", "topic_arn": "arn:aws:sns:eu-central-1:1:cdc"}
        config = config_of(to_webhook(slack), to_mail(mail), topic)
        found = [replace(wrong(name), detail="&" * 100_000) for name in names]
        memory, problems = _told(config, found)
        assert (memory.outbox, problems) == ({}, [])
    assert len(memory.dump()) < 2_000_000
    assert len(_as_sent(slack.received[0])) < 40_000
    assert "more; cdc-assets status shows all" in slack.received[0]["attachments"][-1]["text"]
    assert "more; cdc-assets status shows all" in mail.received[0]
    assert max(map(len, mail.received[0].encode().split(b"\r\n"))) < 998
    [sent] = published
    assert len(sent["Subject"]) < 100 and sent["Subject"].isascii()
    assert len(sent["Message"].encode()) < 256 * 1024
    assert sent["Subject"].endswith("(and 599 more)")


def _rendered(markup: str) -> list[str]:
    """The kinds of a Markdown document's elements, as GitHub's flavour has them."""
    found: list[str] = []
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    for token in tokens.parse(markup):
        found.append(token.type)
        found += [child.type for child in token.children or ()]
    return found


def _shown(markup: str) -> str:
    tokens = MarkdownIt("commonmark").parse(markup)
    parts = [c.content for t in tokens for c in t.children or () if c.type == "text"]
    return "".join(parts)


_ACTIVE = {"image", "link_open", "html_inline", "html_block", "code_inline", "s_open"}


@given(NAMES)
@example(HOSTILE[3])
@example("http://evil/x www.evil.com a@evil.com https://evil")
def test_markdown_shows_any_name_as_it_is(name: str) -> None:
    made = as_markdown(f"a {name} z")
    assert not _ACTIVE & set(_rendered(made)), made
    # What the UI links without a mark, by the patterns of GitHub's flavour.
    bare = r"https?://|www\.[\w.-]|[\w.+-]@[-\w]"
    assert not re.search(bare, _shown(made), re.IGNORECASE)
    plainly = plain(" ".join(f"a {name} z".split())).replace("\u200b", "")
    assert of_markdown(made) == plainly
    assert _shown(made).replace("\u200b", "") == plainly


@pytest.mark.parametrize("name", HOSTILE)
def test_checks_and_reports_are_no_markup_whatever_a_table_is_called(name: str) -> None:
    config = config_of({"type": "log"})
    names = all_tables(config)[0]
    finding = Finding("table_missing", "error", f"{name} isn't there", f"make {name}", None)
    status = TableStatus(name, "l", "parked", name, 1, None, None, None, None, 0, 0, 0, 0)
    ready, lag = check_ready([finding], names), check_lag(status, names)
    flusher = FlusherStatus("down", report={"last_error": name})
    source = SourceStatus("shop", (status,), "s", None, flusher, {})
    report = markdown(Health(source, (Problem(wrong(name), "fail"),), ()))
    shown = [str(ready.metadata["findings"].value), ready.description or "", lag.description or ""]
    for said in shown:
        assert len(said) < 12_000
        assert not (_ACTIVE - {"code_inline"}) & set(_rendered(said)), said
    # This renderer leaves the plots alone: it takes no SVG.
    assert not (_ACTIVE - {"code_inline"}) & set(_rendered(report)), report


def test_comments_of_any_size_are_bounded_in_an_assets_metadata() -> None:
    column = DescribedColumn("c", "text", not_null=False, is_key=False, comment="x" * 10**7)
    found = Described(TableId("public", "t"), "y" * 10**7, 1, (column,) * 100)
    made = described_metadata(found, "postgresql://h/d")
    assert len(made["comment"]) == 1_000
    assert all(len(c.description) == 300 for c in made["columns"].columns)


@given(NAMES)
@example(HOSTILE[0])
@example(HOSTILE[1])
@example("[bold\\")
@example(":smile:")
@example("a\u0301\tb")
def test_a_terminal_shows_any_name_as_it_is_and_obeys_none(name: str) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=10_000, highlight=False, soft_wrap=True)
    console.print(terminal.shown(f"<{name}>"))
    assert "\x1b" not in out.getvalue()
    # rich counts the cells to a tab stop, of which a combining character has none.
    assert out.getvalue().rstrip("\n").split() == f"<{plain(name)}>".split()
    table = Table()
    table.add_column("table")
    table.add_row(terminal.shown(name))
    console.print(table)
    assert "\x1b]" not in out.getvalue() and "\x07" not in out.getvalue()


def test_labels_and_lines_of_the_command_line_are_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in HOSTILE:
        terminal.labelled("error:", "bold red", name)
        terminal.note(name)
        terminal.say(name)
    out, err = capsys.readouterr()
    assert not _OBEYED.search(out.replace("\n", "")) and not _OBEYED.search(err)
    assert "[bold]x[/bold]" in err and "\\[bold]x[/bold]\\" in out


@given(NAMES)
def test_a_subject_is_one_short_line(name: str) -> None:
    made = header(name, " (and 3 more)")
    assert len(made) < 100 and made.endswith(" (and 3 more)")
    assert made.isprintable() or "\u200b" in name or not _OBEYED.search(made)
