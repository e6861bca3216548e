"""Answers other than the one that was hoped for, all of one form."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import UnidentifiedImageError
from starlette.exceptions import HTTPException

from bier.errors import BierError, DataError
from bier.images.decode import MAX_PIXELS
from bier.web.guard import error_body


class Problem(Exception):  # noqa: N818 - it is an answer, not a failure of ours
    """An answer other than the one that was hoped for."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def refused_picture(error: DataError) -> Problem:
    """Why `open_image` refused, told by what made it: nothing but itself (too many pixels), or Pillow's complaint."""
    if error.__cause__ is None:
        return Problem(413, "too_many_pixels", f"The picture must have at most {MAX_PIXELS / 1e6:.0f} megapixels.")
    if isinstance(error.__cause__, UnidentifiedImageError):
        return Problem(415, "not_a_picture", "This is not a picture in a known format such as JPEG, PNG or WebP.")
    return Problem(422, "broken_picture", "The picture is broken: it could not be read to its end.")


def add_errors(app: FastAPI) -> None:
    def answer(status: int, code: str, message: str) -> JSONResponse:
        return JSONResponse(error_body(code, message), status)

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return answer(error.status, error.code, error.message)

    @app.exception_handler(BierError)
    async def unavailable(_: Request, error: BierError) -> JSONResponse:
        return answer(503, "unavailable", " ".join(str(error).split()))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return answer(422, "invalid", f"The '{first['loc'][-1]}' parameter is not right: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, "http", str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return answer(500, "internal", "Something went wrong here. The server's terminal says what.")
