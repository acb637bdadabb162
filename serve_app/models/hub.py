"""Models on the Hugging Face hub: their config and sizes, without a download of their weights."""

from pathlib import Path
from typing import Protocol

from serve_app.models.errors import ModelError
from serve_app.models.model_files import CONFIG, ModelFiles, read_config, read_folder, weights_of
from serve_app.system.distribution import extra
from serve_app.system.hub_errors import explain

TIMEOUT_S = 15.0
"""Timeout for an answer of the hub, in seconds."""


class Hub(Protocol):
    """The interface of a model hub."""

    def sizes(self, id: str, revision: str | None) -> dict[str, int]:
        """Return the sizes of a model's files in bytes, by path.

        Raises:
            HubAwayError: The hub is unreachable or off limits.
            ModelError: The hub has no such model, or doesn't show it.
        """
        ...

    def config(self, id: str, revision: str | None) -> Path:
        """Download the model's config.json and return its path.

        Raises:
            HubAwayError: The hub is unreachable or off limits.
            ModelError: The file doesn't exist, or the hub refuses it.
        """
        ...

    def cached(self, id: str, revision: str | None) -> Path | None:
        """Return the directory of an earlier download; None if there is none."""
        ...


class HubAwayError(ModelError):
    """The hub is unreachable or off limits; the message has the reason."""


def read_model(id: str, revision: str | None, hub: Hub) -> ModelFiles:
    """Return the files of a model on the hub, or of an earlier download if the hub is unreachable.

    Raises:
        ModelError: The model doesn't exist, is closed to this user, or its files are incomplete.
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
            raise ModelError(f"{id}: {error}, and the earlier download is incomplete: {incomplete}") from None
    return ModelFiles(id, read_config(config), weights_of(sizes, id), download=True)


class HuggingFaceHub:
    """Hugging Face's client of the hub, with the token of `HF_TOKEN` or `hf auth login`.

    Args:
        endpoint: URL of the hub; default: `HF_ENDPOINT`, or huggingface.co.

    Raises:
        ModelError: The client is not installed; it comes with vLLM.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise ModelError(
                f"models of the Hugging Face hub need huggingface_hub, which comes with vLLM: {extra('hf')}"
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
        """Return an error that explains an error of the client to the user."""
        failure = explain(error, id, CONFIG, kind="model", revision=revision)
        return (HubAwayError if failure.away else ModelError)(failure.message)
