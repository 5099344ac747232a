-- Masked columns (cdc_assets.masks), by name as configured, and by attribute number as far as known.
alter table tables add column masks jsonb not null default '{}',
    add column mask_numbers jsonb not null default '{}',
    -- The masks of whoever asked for its next copy; null: nobody did. Another process has none made.
    add column mask_wish jsonb;
