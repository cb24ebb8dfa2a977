"""The service: fine-tuning for many tenants behind the API people already use."""
