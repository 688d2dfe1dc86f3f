"""`octavo dashboard`: a page to chat with a server, compare, load and look into it. Built with Gradio.

A tab is a module of this package with ``build(session: Session) -> None``, which adds Gradio components inside the tab
that `page` has opened for it, and their events. To add one, write the module and name it in `page.TABS`.

- ``session.address`` is the server's (raises OctavoError while it starts, or if it failed), ``session.api_key(key)``
  what to send to it. ``key`` is this visitor's own: take ``session.key`` (a `gr.State`) as an input of the event.
- ``session.model`` is a `gr.State` with the served `Model`: its ``change`` event says when the server is there.
- Visitors do not share anything else: keep what belongs to one in a `gr.State`, never in ``session``.
- Errors for people: ``with errors_shown(): ...`` around what may raise OctavoError. Events take ``**QUIET``.
- A tab has no logic that `octavo.bench` or `octavo.plan` has: it calls theirs.

Only `page` and the tabs import Gradio, and they are imported by `app.serve` alone: it takes seconds.
"""
