"""The page to review and label images, and the choice of the next images to label.

`ordering` ranks images, `session` has the images of a run or folder with the decisions on them, `server` is the API,
`guards` are the checks of its requests, and `static/` is the page. FastAPI and uvicorn come with the extra `review`.
"""
