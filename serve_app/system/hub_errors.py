"""One-line messages for errors of the Hugging Face hub's client."""

from typing import NamedTuple


class HubFailure(NamedTuple):
    """The reason why the hub did not return a file.

    Attributes:
        message: The reason and the remedy.
        away: Whether the hub is unreachable or off limits, so that an earlier download may be used.
    """

    message: str
    away: bool = False


def explain(error: Exception, id: str, file: str, *, kind: str, revision: str | None) -> HubFailure:
    """Explain an error of the client to a user.

    Args:
        error: The exception from the client.
        id: The repository.
        file: A file that every repository of this kind must have.
        kind: "model" or "adapter".
        revision: The requested revision; None: the main branch.
    """
    from huggingface_hub import errors, get_token

    page = f"https://huggingface.co/{id}"
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # The client read its cache after the hub's error, which is the cause.
        error = error.__cause__
    match error:
        case errors.GatedRepoError() if get_token():
            return HubFailure(
                f"{id} is gated, and your Hugging Face token has no access to it; ask for access on {page}"
            )
        case errors.GatedRepoError():
            return HubFailure(
                f"{id} is gated: accept its terms on {page}, then set HF_TOKEN or run `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return HubFailure(f"{id} has no revision {revision!r}; {page}/tree/main lists them")
        case errors.RepositoryNotFoundError():
            return HubFailure(
                f"the Hugging Face hub has no model {id}, or shows it to others only; check the id on "
                f"{page}, and for a private model set HF_TOKEN or run `hf auth login`"
            )
        case errors.RemoteEntryNotFoundError():
            return HubFailure(f"{id} has no {file}, so it is no {kind} that vLLM can load; see {page}")
        case errors.HFValidationError():
            return HubFailure(f"{id!r} is not a Hugging Face id; they look like Qwen/Qwen2.5-7B-Instruct")
        case errors.OfflineModeIsEnabled():
            return HubFailure("HF_HUB_OFFLINE is set", away=True)
        case errors.HfHubHTTPError() if error.response.status_code < 500:
            return HubFailure(f"{id}: the Hugging Face hub answers {error.response.status_code}")
        case _:
            # All other failures: network, name, certificate, proxy, an invalid answer.
            return HubFailure(f"the Hugging Face hub can't be reached ({type(error).__name__})", away=True)
