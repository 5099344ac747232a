"""pyiceberg's access to files, kept to the places that the configuration names."""

from __future__ import annotations

import json
from functools import lru_cache

from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.io import PY_IO_IMPL, S3_RETRY_STRATEGY_IMPL, InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.typedef import Properties

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.staged.places import ForeignPath, Place
from cdc_assets.log.staged.storage import Storage, files_of_keys
from cdc_assets.process.home import home

PLACES = "cdc.places"
# What the properties of an object store's clients begin with.
_OF_STORES = ("s3.", "client.")


class PlacedFileIO(PyArrowFileIO):
    """pyiceberg's FileIO, limited to files below the places of its property PLACES, a JSON list.

    Raises ForeignPath for others.
    """

    def __init__(self, properties: Properties) -> None:
        super().__init__(properties)
        self._places = [
            Place(uri, Storage(), literal=True) for uri in json.loads(properties[PLACES])
        ]

    def new_input(self, location: str) -> InputFile:  # type: ignore[override]
        return super().new_input(self._ours(location))

    def new_output(self, location: str) -> OutputFile:  # type: ignore[override]
        return super().new_output(self._ours(location))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        super().delete(self._ours(location if isinstance(location, str) else location.location))

    def _initialize_s3_fs(self, netloc: str | None) -> FileSystem:
        given = {k: v for k, v in self.properties.items() if k.startswith(_OF_STORES)}
        return _object_store(netloc, tuple(sorted(given.items())), files_of_keys())

    def _ours(self, location: str) -> str:
        if any(place.holds(location) for place in self._places):
            return location
        raise ForeignPath(location, " or ".join(place.uri for place in self._places))


@lru_cache(maxsize=16)
def _object_store(
    bucket: str | None, properties: tuple[tuple[str, str], ...], _keys: object
) -> FileSystem:
    """The client of a bucket, which pyiceberg would make again for each look at a table.

    So connections are used again; and a small file is one request instead of three.
    """
    given = dict(properties)
    made = PyArrowFileIO(given)._initialize_s3_fs(bucket)
    if S3_RETRY_STRATEGY_IMPL in given:  # which isn't among the options
        return made
    _, (options,) = made.__reduce__()
    return S3FileSystem(**{**options, "allow_delayed_open": True})


def file_io(config: SourceConfig) -> dict[str, str]:
    """The properties that limit pyiceberg to the configured places; empty where they can't."""
    places = trusted_places(config)
    if config.lake.catalog.type != "sql":
        return {}
    try:
        for uri in places:
            Place(uri, Storage(), literal=True)
    except ForeignPath:  # a warehouse that is neither a folder nor in S3
        return {}
    return {
        PY_IO_IMPL: f"{PlacedFileIO.__module__}.{PlacedFileIO.__name__}",
        PLACES: json.dumps(places),
    }


def trusted_places(config: SourceConfig) -> list[str]:
    """Where lake tables may be: the warehouse as it is, and as earlier versions spelled it."""
    places = [config.warehouse, *config.lake.catalog.locations]
    if config.lake.catalog.warehouse is None:
        earlier = (home() / config.name / "warehouse").as_uri()
        places += [earlier] if earlier not in places else []
    return places
