-- Masked columns (cdc_assets.masks), by name as configured, and by attribute number as far as known.
alter table tables add column masks jsonb not null default '{}',
    add column mask_numbers jsonb not null default '{}';
