"""What the plugin's runner knows about models: configs, cache specs, protocols, registry."""
