"""The JSON of the API, as OpenAPI describes it."""

from pydantic import BaseModel, Field

Recall = dict[str, float]


class ErrorDetail(BaseModel):
    code: str
    message: str = Field(description="One sentence for people.")


class Error(BaseModel):
    error: ErrorDetail


class Prefix(BaseModel):
    """The first learners together, as a smaller ensemble."""

    learners: int
    dimension: int = Field(description="Dimensions of the vector.")
    bytes: int = Field(description="Size of the vector as float32.")
    recall: Recall | None = Field(description="Percent by K: {'1': 57.5}; null if it was not measured.")


class Learner(BaseModel):
    learner: int
    dimension: int
    recall: Recall | None


class UploadLimits(BaseModel):
    bytes: int
    pixels: int


class Status(BaseModel):
    title: str
    images: int
    classes: int
    groups: list[int]
    dimension: int
    prefixes: list[Prefix]
    learners: list[Learner]
    queries: int | None = Field(description="Images that recall was measured with.")
    measured_on: str | None = Field(description="Which images these are; no class of them was trained on.")
    backbone: str
    upload: UploadLimits
    report: bool = Field(description="Whether /report/ has the report of the run.")
    version: str = Field(description="Changes with every start; with it in their address, images are cached.")


class ImageRef(BaseModel):
    id: str
    label: str | None


class Browsed(BaseModel):
    matching: int
    images: list[ImageRef]


class Hit(ImageRef):
    score: float = Field(description="The dot product of the two vectors.")
    similarity: float = Field(description="The cosine: 1 for the same picture.")
    same: bool | None = Field(description="Whether it lies above the row's threshold; null without one.")
    right: bool | None = Field(description="Whether the label is the query's; null if either is unknown.")


class Row(BaseModel):
    name: str = Field(description="'ensemble', or 'learner-1' and so on.")
    learners: list[int] = Field(description="The learners that are compared, numbered from 1.")
    dimension: int
    threshold: float | None = Field(
        description="The similarity from which the model counts images as the same; null if it keeps none."
    )
    results: list[Hit] = Field(description="Images above the threshold come before the others.")


class Answer(BaseModel):
    query: ImageRef
    others: list[ImageRef] = Field(description="Further pictures of the same query.")
    rows: list[Row]
    milliseconds: dict[str, float] = Field(description="'encode' and 'search'.")
