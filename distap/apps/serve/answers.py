"""The shape of answers, which OpenAPI describes."""

from pydantic import BaseModel, Field

from distap.retrieval.index_files import Hit


class HitAnswer(BaseModel):
    """An image of the gallery."""

    rank: int = Field(description="From 1, the most similar.")
    key: str = Field(description="Its name in the data set.")
    class_name: str = Field(serialization_alias="class", description="Empty where it belongs to none.")
    similarity: float = Field(description="Cosine, approximate where the index keeps codes.")
    picture: str = Field(description="Path of a thumbnail.")


class SearchAnswer(BaseModel):
    """What was found, best first."""

    hits: list[HitAnswer]


class ErrorAnswer(BaseModel):
    """Why there is no answer."""

    reason: str = Field(description="For programs.")
    message: str = Field(description="For a person: what was wrong, and what to do.")


class ProblemAnswer(BaseModel):
    """What every request that failed is answered."""

    error: ErrorAnswer


def answer_of(hits: list[Hit]) -> SearchAnswer:
    """An answer with these hits, best first."""
    return SearchAnswer(
        hits=[
            HitAnswer(
                rank=rank,
                key=hit.key,
                class_name=hit.class_name,
                similarity=hit.similarity,
                picture=f"/images/{hit.row}",
            )
            for rank, hit in enumerate(hits, 1)
        ]
    )
