"""The demo, `headwater demo`: a small shop in the browser.

`shop` is its database, `application` the functions that the page calls, `workload` the writes that
run all the time, `assistant` the answers in the chat, `revenue` the streaming view, `pipeline` the
process that maintains it, `site` the page and its tokens, `terminal_commands` the commands that it
shows. `startup` starts and stops all of it; `lock` allows one demo per data folder. The files of
the page are in `page/`. The demo runs on the embedded PostgreSQL in its own data folder, and does
not touch the user's databases.
"""
