"""Whether what is no directory here can be had from the Hugging Face hub, asked once and without waiting for long.

The libraries that load models and datasets ask for each file, and try again for half a minute each, before they say that
there is no such thing or no network.
"""

from __future__ import annotations

from pathlib import Path

from sluice.config import ConfigError, reason_of

__all__ = ["check_hub", "check_hub_dataset"]


def check_hub(model: str, setting: str = "model") -> None:
    """Refuse the id of a model that is not there, or cannot be reached; a directory or a model in the cache is taken.

    One request, of at most `HF_HUB_ETAG_TIMEOUT` seconds (10). A hub that is merely busy is left to whoever loads the model.

    Args:
        model: What the setting names.
        setting: Its name, for the message.

    Raises:
        ConfigError: with what the hub says, and the remedy.
    """
    if Path(model).is_dir():
        return
    # Half a second of import that directories do not need.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError  # noqa: PLC0415

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        _ask(model, setting, "model", "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {model!r} is no directory and no hub id: {reason_of(error)}") from error
    except EntryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {model} of the hub has no config.json: name a model that transformers loads"
        ) from error


def check_hub_dataset(name: str, setting: str = "data") -> None:
    """Refuse the id of a dataset that is not there, or cannot be reached; as `check_hub`.

    Raises:
        ConfigError: with what the hub says, and the remedy.
    """
    from datasets.config import HF_DATASETS_CACHE  # noqa: PLC0415  as above
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError  # noqa: PLC0415

    if Path(name).exists() or (Path(HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
        return
    try:
        _ask(name, setting, "dataset", "README.md")
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {name!r} is no directory and no hub id: {reason_of(error)}") from error
    except EntryNotFoundError:  # the dataset is there, without that file
        return


def _ask(name: str, setting: str, kind: str, file: str) -> None:
    """Ask for a file once.

    Raises:
        ConfigError: if it cannot be had.
        EntryNotFoundError: of huggingface_hub, if what is named has no such file.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # noqa: PLC0415  HTTPError of its HTTP library
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        RepositoryNotFoundError,
    )

    absent = f"{setting}: {name} is no directory here and not in the cache, and"
    if constants.is_offline_mode():
        raise ConfigError(f"{absent} HF_HUB_OFFLINE forbids to ask the hub")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except GatedRepoError as error:
        raise ConfigError(
            f"{setting}: {name} is gated: ask for access on its page, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {name} is no directory here, and the hub has no such {kind} (or hides it): correct the name, or log in"
            " with `hf auth login`"
        ) from error
    except EntryNotFoundError:
        raise
    except HfHubHTTPError:
        return
    except HTTPError as error:
        raise ConfigError(
            f"{absent} {constants.ENDPOINT} cannot be reached ({reason_of(error)}): name a directory, or see to the network"
        ) from error
