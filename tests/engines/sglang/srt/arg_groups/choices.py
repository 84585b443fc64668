ATTENTION_BACKEND_CHOICES: list = []
DETERMINISTIC_ATTENTION_BACKEND_CHOICES: list = []

add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
add_deterministic_attention_backend_choices = DETERMINISTIC_ATTENTION_BACKEND_CHOICES.extend
