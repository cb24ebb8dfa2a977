"""The dashboard: one static page that uses the public routes with the user's own key, and one overview for it."""

from weft.serve.dashboard.routes import router

__all__ = ["router"]
