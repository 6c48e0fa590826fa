"""From a spec to a published package: plan, environment, formatting, manifest, publication.

Nothing is imported here, so that finding a package unchanged costs neither jinja2 nor black.
"""
