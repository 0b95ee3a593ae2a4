-- Least-privilege roles on the tables and the view. As the owner of the tables with CREATEROLE, their schema first in
-- search_path: psql -v ON_ERROR_STOP=1 --single-transaction -f. May be run again at any time. Roles are the cluster's: where
-- several registries live in one cluster they share the roles' names, and each grants on its own tables.
DO $$
DECLARE
  v_role text;
BEGIN
  FOREACH v_role IN ARRAY ARRAY['llama_ckpt_reader', 'llama_ckpt_writer', 'llama_ckpt_collector'] LOOP
    BEGIN
      EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
    EXCEPTION
      WHEN duplicate_object OR unique_violation THEN NULL;
    END;
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), v_role);
  END LOOP;
END
$$;

-- The reader looks.
GRANT SELECT ON llama_ckpt_schema, registry_info, registry_lease, llama_model, llama_checkpoint_meta, checkpoint_prefix,
  save_claim, gc_run, gc_run_item, ghost_seen, gc_schedule, usage_day, llama_checkpoint_v TO llama_ckpt_reader;

-- The writer saves, restores, pins and removes: it marks rows STALE, but deletes none.
GRANT SELECT ON llama_ckpt_schema, registry_info, registry_lease, gc_run, gc_run_item, ghost_seen, gc_schedule, llama_checkpoint_v
  TO llama_ckpt_writer;
GRANT SELECT, INSERT ON llama_model TO llama_ckpt_writer;
GRANT SELECT, INSERT, UPDATE ON llama_checkpoint_meta, usage_day TO llama_ckpt_writer;
GRANT SELECT, INSERT, DELETE ON checkpoint_prefix TO llama_ckpt_writer;
GRANT SELECT, INSERT, UPDATE, DELETE ON save_claim TO llama_ckpt_writer;

-- The collector prunes and frees: it marks and deletes rows, but adds no checkpoint.
GRANT SELECT ON llama_ckpt_schema, registry_info, llama_model, usage_day, llama_checkpoint_v TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON save_claim, ghost_seen, gc_schedule TO llama_ckpt_collector;
GRANT SELECT, UPDATE ON registry_lease TO llama_ckpt_collector;
GRANT SELECT, UPDATE, DELETE ON llama_checkpoint_meta TO llama_ckpt_collector;
GRANT SELECT, DELETE ON checkpoint_prefix TO llama_ckpt_collector;
GRANT SELECT, INSERT, UPDATE, DELETE ON gc_run TO llama_ckpt_collector;
GRANT SELECT, INSERT ON gc_run_item TO llama_ckpt_collector;
