"""Whether a model that is no directory can be had from the Hugging Face hub, asked once and without waiting for long.

The libraries that load models ask for each file, and try again for half a minute each, before they say that there is no
such model or no network.
"""

from __future__ import annotations

from pathlib import Path

from sluice.config import ConfigError, reason_of

__all__ = ["check_hub"]


def check_hub(model: str, setting: str = "model") -> None:
    """Refuse a hub id that names nothing, or nothing that can be reached; a directory or a model in the cache is taken.

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
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # noqa: PLC0415  HTTPError of its HTTP library
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        if constants.is_offline_mode():
            raise ConfigError(
                f"{setting}: {model} is no directory and not in the cache, and HF_HUB_OFFLINE forbids to ask the hub"
            )
        url = hf_hub_url(model, "config.json")
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HFValidationError as error:
        raise ConfigError(f"{setting}: {model!r} is no directory and no hub id: {reason_of(error)}") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{setting}: {model} is gated: ask for access on its page, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {model} is no directory here, and the hub has no such model (or hides it): correct the name, or log in"
            " with `hf auth login`"
        ) from error
    except EntryNotFoundError as error:
        raise ConfigError(
            f"{setting}: {model} of the hub has no config.json: name a model that transformers loads"
        ) from error
    except HfHubHTTPError:
        return
    except HTTPError as error:
        raise ConfigError(
            f"{setting}: {model} is no directory here and not in the cache, and {constants.ENDPOINT} cannot be reached"
            f" ({reason_of(error)}): name a directory, or see to the network"
        ) from error
