"""All checks of a set of rendered documents."""

from tests.k8s import agreement, monitoring, reach, safety, schemas
from tests.k8s.rendering import Document


def problems(documents: list[Document]) -> list[str]:
    """Return what is wrong: each with the document, the path of the field, and what is expected there."""
    found = [
        f"{document['kind']}/{document['metadata'].get('name')}: {problem}"
        for document in documents
        for problem in schemas.problems(document)
    ]
    # Malformed documents can't be compared.
    return found or [
        *agreement.problems(documents),
        *safety.problems(documents),
        *reach.problems(documents),
        *monitoring.problems(documents),
    ]
