"""A random oracle over the whole pipeline: seeded plans, real servers, an independent comparison.

``python -m cdc_assets_tests.oracle`` runs seeds one after the other on one Postgres and one Spark.
A *plan* (``plan``) is data: tables, transactions and what happens to the pipeline, made from a seed
(``generate``) or read from a file. A *world* (``world``) plays it. What the source went through is
recorded by the source itself (``record``), and at the end the lake, read by pyiceberg alone
(``lake_rows``), has to be what that record and the source's own rows say (``judge``). A plan that
fails is made smaller while it still fails (``shrink``).

Nothing here decodes, folds, casts or compares by means of the product.
"""
