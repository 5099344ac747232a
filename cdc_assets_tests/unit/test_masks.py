"""What a mask makes of a value, and which columns are masked whatever they are called."""

from __future__ import annotations

import pickle
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_assets.config.source import parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.decode.excluded import hidden
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.masks import Mask
from cdc_assets_tests.unit.flusher.test_excluded import (
    REGISTERED,
    Catalog,
    a_moment,
    histories,
)

SALT = b"sixteen bytes or more"
HASH, STARS, END = Mask("sha256", SALT), Mask("redact"), Mask("last4")
# ``secret`` of ``id, secret, v``.
SPEC: DecodeSpec = replace(REGISTERED.spec(), masks=(("secret", HASH),), mask_numbers=((2, HASH),))


@pytest.mark.parametrize(
    ("mask", "value", "masked"),
    [
        (HASH, "a@b.c", sha256(SALT + b"a@b.c").hexdigest()),
        (HASH, "", sha256(SALT).hexdigest()),
        (STARS, "anything", "***"),
        (STARS, "", "***"),
        (END, "4111 1111 1111 1234", "****1234"),
        (END, "12345678", "****5678"),
        (END, "1234567", "****"),
        (END, "Zürich ✈✈ü", "**** ✈✈ü"),
        (END, None, None),
        (HASH, None, None),
    ],
)
def test_what_a_mask_makes_of_a_value(mask: Mask, value: str | None, masked: str | None) -> None:
    assert mask.text(value) == masked
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        found = mask.array(pa.array([value, None], pa.string()).cast(kind))
        assert found.type == kind
        assert found.cast(pa.string()).to_pylist() == [masked, None]


def test_text_that_no_encoding_has_is_masked_too() -> None:
    for mask in (HASH, STARS, END):
        [found] = mask.array(pa.array([b"\xff\xfe secret \xff"], pa.large_binary())).to_pylist()
        assert b"secret" not in found
        found.decode()


def test_a_salt_is_in_no_text() -> None:
    assert SALT.decode() not in repr(HASH) + HASH.rule
    assert pickle.loads(pickle.dumps(HASH)) == HASH


@pytest.mark.parametrize("rule", ["sha256:00000000", "rot13", ""])
def test_a_rule_that_cannot_be_followed_lets_nothing_out(rule: str) -> None:
    assert Mask.of_rule(rule, SALT) == STARS


@pytest.mark.parametrize("mask", [HASH, STARS, END])
def test_a_rule_is_its_mask(mask: Mask) -> None:
    assert Mask.of_rule(mask.rule, SALT) == mask


def test_a_masked_column_that_was_renamed_is_masked() -> None:
    renamed = Catalog(("id", "open", "v"))
    found = hidden(SPEC, renamed.relation(), renamed.attributes(), listed=False)
    assert dict(found.masks)["open"] == HASH
    assert not found.doubtful


def test_what_may_be_masked_or_not_is_hidden() -> None:
    then, now = Catalog(("id", None, "v")), Catalog(("id", None, "w", "x"))
    found = hidden(SPEC, then.relation(), now.attributes(), listed=False)
    assert found.doubtful == ("v",)
    assert "v" in found.names


def test_of_two_masks_neither_lets_anything_out() -> None:
    """The columns swapped their names: each is one by its name, and another by its number."""
    masks = (("secret", STARS), ("v", END))
    spec = replace(SPEC, masks=masks, mask_numbers=((2, STARS), (3, END)))
    swapped = Catalog(("id", "v", "secret"))
    found = hidden(spec, swapped.relation(), swapped.attributes(), listed=False)
    assert dict(found.masks) == {"v": STARS, "secret": STARS}


def test_a_column_that_comes_later_is_remembered_by_its_number() -> None:
    spec = replace(Catalog(("id",)).spec(), masks=(("secret", END),))
    added = Catalog(("id", "secret"))
    found = hidden(spec, added.relation(), added.attributes(), listed=False)
    assert found.mask_numbers == ((2, END),)


@settings(max_examples=1000)
@given(histories(), st.data())
def test_whatever_the_history(states: list[Catalog], data: st.DataObject) -> None:
    then, secret = a_moment(states, data)
    found = hidden(SPEC, then.relation(), states[-1].attributes(), listed=False)
    assert secret <= found.names | dict(found.masks).keys()
    wrongly = (found.names | dict(found.masks).keys()) & set(then.names) - secret
    assert wrongly <= set(found.doubtful)


def _config(columns: dict[str, Any], **settings: Any) -> Any:
    tables = [{"name": "t", "columns": columns}]
    return parse_config(
        {"name": "s", "postgres": {"dsn": "host=h"}, "tables": tables, **settings}, "test"
    )


@pytest.mark.parametrize(
    ("columns", "more", "said"),
    [
        ({"mask": {"a": "md5"}}, {}, "sha256"),
        ({"mask": {"a": "sha256"}}, {}, "mask_salt: missing; public.t has a column with mask"),
        ({"mask": {"a": "sha256"}}, {"mask_salt": "short"}, "at least 16 characters"),
        ({"mask": {"a": "redact"}, "exclude": ["a"]}, {}, "a is in exclude, too"),
        ({"mask": {"a": "redact"}, "types": {"a": "string"}}, {}, "a is masked"),
    ],
)
def test_what_a_configuration_may_not_say(
    columns: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        _config(columns, **more)
    assert "short" not in str(refused.value)


def test_a_child_masks_as_its_parent_does() -> None:
    config = _config({"mask": {"a": "sha256"}}, mask_salt=SALT.decode())
    assert SALT.decode() not in repr(config)
    again = type(config).model_validate_json(config.dump())
    [table] = again.tables
    assert again.masks(table.id) == {"a": HASH}
