-- Which rows of the table are replicated (tables[].where), as configured when it was described.
alter table tables add column filter_wanted text,
    -- The same as the server writes it, since its pin; what rows are read by.
    add column row_filter text,
    -- The filter of whoever asked for its next copy; said along with mask_wish.
    add column filter_wish text;
