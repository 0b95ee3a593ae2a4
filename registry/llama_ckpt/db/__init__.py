"""The database: connections, schema and statements. The only package that imports sqlalchemy.

Owns every statement: `rows` finds and inserts, `marks` changes their status, `prefixes` has the links that a prefix search
reads, `leases` and `coordination` what processes agree on, `collecting` what prune and gc need. `tables`, `types` and `migrate`
are the schema.
It imports `gc_values`, `values`, `fingerprint` and `errors`, never another pillar (retention, store, engine, metrics).
"""
