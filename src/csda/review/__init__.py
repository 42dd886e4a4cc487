"""The page on which images are looked at and labeled, and what helps most to label next.

`ordering` ranks images, `session` knows the images of a run or folder and what was decided on them, `server` is the
API and its guards, `static/` the page itself. FastAPI and uvicorn come with the extra `review`.
"""
