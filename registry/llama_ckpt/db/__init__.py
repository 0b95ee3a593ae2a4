"""The database: connections, schema and statements. The only package that imports sqlalchemy.

It imports `gc_values`, `values`, `fingerprint` and `errors`, never another pillar (retention, store, engine, metrics).
"""
