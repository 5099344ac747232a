-- excluded_numbers: the attribute numbers that excluded columns were seen with. A rename keeps them, so
-- that a column stays in the source under whatever name.
alter table tables add column excluded_numbers int[] not null default '{}';
update tables set excluded_numbers = array(
    select (c ->> 'number')::int from jsonb_array_elements(columns) c where c ->> 'name' = any(excluded));
