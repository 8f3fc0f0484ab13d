{{/* Rules of NetworkPolicies; each begins with a new line, or is empty. A rule without peers would allow all peers,
so a rule with an empty list is left out. */}}

{{- define "draftwire.rules" -}}
{{- if trim . -}}
{{ nindent 4 (trim .) }}
{{- else }} []
{{- end -}}
{{- end }}

{{/* (dict "root" $ "service" "gateway"): the pods of a service, as a peer. */}}
{{- define "draftwire.peer" -}}
podSelector:
  matchLabels:
    {{- include "draftwire.selector" . | nindent 4 }}
{{- end }}

{{- define "draftwire.policyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "draftwire.metadata" . | nindent 2 }}
spec:
  policyTypes: [Ingress, Egress]
  {{- include "draftwire.peer" . | nindent 2 }}
{{- end }}

{{/* (dict "side" "to" "peers" list "ports" list) */}}
{{- define "draftwire.rule" -}}
{{- with .peers }}
- {{ $.side }}:
    {{- toYaml . | nindent 4 }}
  ports:
    {{- range $.ports }}
    - {protocol: TCP, port: {{ . | int }}}
    {{- end }}
{{- end }}
{{- end }}

{{- define "draftwire.fromServices" }}
- from:
    {{- range .callers }}
    - {{ include "draftwire.peer" (dict "root" $.root "service" .) | nindent 6 | trim }}
    {{- end }}
  ports:
    - {protocol: TCP, port: {{ include "draftwire.port" . }}}
{{- end }}

{{- define "draftwire.toService" }}
- to:
    - {{ include "draftwire.peer" . | nindent 6 | trim }}
  ports:
    - {protocol: TCP, port: {{ include "draftwire.port" . }}}
{{- end }}

{{- define "draftwire.fromScrapers" -}}
{{- if .root.Values.monitoring.enabled }}
{{- include "draftwire.rule" (dict "side" "from" "peers" .root.Values.networkPolicy.scrapers "ports" (list (include "draftwire.metricsPort" .))) }}
{{- end }}
{{- end }}

{{/* Egress of every pod: DNS and the trace collector. */}}
{{- define "draftwire.toCommon" -}}
{{- with .root.Values.networkPolicy }}
{{- with .dns }}
- to:
    {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
{{- include "draftwire.rule" (dict "side" "to" "peers" .traces.to "ports" .traces.ports) }}
{{- end }}
{{- end }}

{{/* Egress of the services that load models: the hub, and what init containers fetch from. */}}
{{- define "draftwire.toModels" -}}
{{- with .root.Values.networkPolicy }}
{{- if $.root.Values.models.hub.enabled }}
{{- include "draftwire.rule" (dict "side" "to" "peers" .hub.to "ports" .hub.ports) }}
{{- end }}
{{- include "draftwire.rule" (dict "side" "to" "peers" .storage.to "ports" .storage.ports) }}
{{- end }}
{{- end }}
