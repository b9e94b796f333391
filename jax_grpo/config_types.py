"""What settings are made of: kinds of numbers and texts, and a frozen group of them that refuses what it does not know."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

Dtype = Literal["float32", "bfloat16", "float64"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]  # jitted programs take it as an int32
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _count_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(f"is {value!r}; expected a whole number of at least 1, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], pydantic.PlainValidator(_count_or_auto)]


class Section(pydantic.BaseModel):
    """A frozen group of settings; unknown keys, wrong types and non-finite numbers are refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
