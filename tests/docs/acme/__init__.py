"""A made-up vendor, Acme: the example of docs/dev/add-a-vendor.md."""
