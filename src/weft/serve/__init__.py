"""The service: fine-tuning for many tenants, with the API people already use."""
