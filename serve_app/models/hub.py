"""Models on the Hugging Face hub: what they need, without a download of their weights."""

from pathlib import Path
from typing import Protocol

from serve_app.models.errors import ModelError
from serve_app.models.model_files import CONFIG, ModelFiles, read_config, read_folder, weights_of
from serve_app.system.hub_errors import explain

TIMEOUT_S = 15.0
"""Seconds for an answer of the hub."""


class Hub(Protocol):
    """The questions to a hub of models."""

    def sizes(self, id: str, revision: str | None) -> dict[str, int]:
        """Return the bytes of the files of a model, by their paths.

        Raises:
            HubAwayError: The hub can't be reached, or may not be.
            ModelError: It has no such model, or doesn't show it.
        """
        ...

    def config(self, id: str, revision: str | None) -> Path:
        """Return the model's config.json, which is downloaded.

        Raises:
            HubAwayError: The hub can't be reached, or may not be.
            ModelError: There is none, or the hub doesn't give it.
        """
        ...

    def cached(self, id: str, revision: str | None) -> Path | None:
        """Return the directory of a model that was downloaded before; None: it was not."""
        ...


class HubAwayError(ModelError):
    """The hub can't be reached, or may not be; the message tells the reason."""


def read_model(id: str, revision: str | None, hub: Hub) -> ModelFiles:
    """Return what the hub says of a model; what was downloaded before counts where it can't be reached.

    Raises:
        ModelError: It isn't there, isn't for this user, or its files say too little.
    """
    try:
        sizes = hub.sizes(id, revision)
        config = hub.config(id, revision)
    except HubAwayError as error:
        folder = hub.cached(id, revision)
        if folder is None:
            raise HubAwayError(f"{id}: {error}, and the model was not downloaded before") from None
        try:
            return read_folder(folder, id)
        except ModelError as incomplete:
            raise ModelError(
                f"{id}: {error}, and what was downloaded before is incomplete: {incomplete}"
            ) from None
    return ModelFiles(id, read_config(config), weights_of(sizes, id), download=True)


class HuggingFaceHub:
    """The hub by its own client, with the token of `HF_TOKEN` or `hf auth login`.

    Args:
        endpoint: URL of the hub; by default `HF_ENDPOINT`, or huggingface.co.

    Raises:
        ModelError: The client is not installed; vLLM brings it.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise ModelError(
                "models of the Hugging Face hub need huggingface_hub, which comes with vLLM: "
                "pip install -e '.[gpu]' or '.[cpu]'"
            ) from None
        self._client = huggingface_hub
        self._endpoint = endpoint

    def sizes(self, id: str, revision: str | None) -> dict[str, int]:
        """See `Hub`."""
        try:
            info = self._client.HfApi(self._endpoint).model_info(
                id, revision=revision, files_metadata=True, timeout=TIMEOUT_S
            )
        except Exception as error:  # The client's versions raise errors of different HTTP libraries.
            raise self._explain(error, id, revision) from None
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def config(self, id: str, revision: str | None) -> Path:
        """See `Hub`."""
        try:
            path = self._client.hf_hub_download(
                id, CONFIG, revision=revision, endpoint=self._endpoint, etag_timeout=TIMEOUT_S
            )
        except Exception as error:  # As above.
            raise self._explain(error, id, revision) from None
        return Path(path)

    def cached(self, id: str, revision: str | None) -> Path | None:
        """See `Hub`."""
        path = self._client.try_to_load_from_cache(id, CONFIG, revision=revision)
        return Path(path).parent if isinstance(path, str) else None

    def _explain(self, error: Exception, id: str, revision: str | None) -> ModelError:
        """Return the error that tells the user of the command what an error of the client means."""
        failure = explain(error, id, CONFIG, kind="model", revision=revision)
        return (HubAwayError if failure.away else ModelError)(failure.message)
